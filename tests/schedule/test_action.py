from __future__ import annotations

import pytest

from gpipe_cli.schedule.action import Action, Kind, checked_checkpoint, checkpointed_counts


def test_every_partition_may_have_a_mode_of_its_own() -> None:
    assert checkpointed_counts(("always", "except_last", "never"), 3, 8) == (8, 7, 0)
    assert checkpointed_counts("except_last", 3, 8) == (7, 7, 7)


def test_modes_that_are_all_the_same_are_one() -> None:
    assert checked_checkpoint(["never", "never"], 2) == "never"
    assert checked_checkpoint(["always", "never"], 2) == ("always", "never")
    assert checked_checkpoint("always", 3) == "always"


def test_a_list_of_another_length_and_a_mode_that_there_is_not_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint has 2 modes for 3 partitions; give one for each"):
        checked_checkpoint(["always", "never"], 3)
    with pytest.raises(ValueError, match=r"not one of 'always', 'except_last', or 'never' \('sometimes'\)"):
        checked_checkpoint(["always", "sometimes"], 2)


def test_an_action_is_written_as_kind_partition_and_micro_batch() -> None:
    assert str(Action(Kind.FORWARD, 1, 3)) == "F1.3"
