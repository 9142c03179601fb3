from __future__ import annotations

import pytest

from gpipe_cli.schedule import order
from gpipe_cli.schedule.action import checked_checkpoint, checkpoint_stops
from gpipe_cli.schedule.simulate import PartitionCost, partition_peaks, simulate


def test_every_partition_may_have_a_mode_of_its_own() -> None:
    assert checkpoint_stops(("always", "except_last", "never"), 3, 8) == (8, 7, 0)
    assert checkpoint_stops("except_last", 3, 8) == (7, 7, 7)


def test_modes_that_are_all_the_same_are_one() -> None:
    assert checked_checkpoint(["never", "never"], 2) == "never"
    assert checked_checkpoint(["always", "never"], 2) == ("always", "never")
    assert checked_checkpoint("always", 3) == "always"


def test_a_list_of_another_length_and_a_mode_that_there_is_not_are_refused() -> None:
    with pytest.raises(ValueError, match="checkpoint has 2 modes for 3 partitions; give one for each"):
        checked_checkpoint(["always", "never"], 3)
    with pytest.raises(ValueError, match=r"not one of 'always', 'except_last', or 'never' \('sometimes'\)"):
        checked_checkpoint(["always", "sometimes"], 2)


def test_only_the_partition_that_recomputes_takes_longer_and_keeps_less() -> None:
    actions, costs = order("gpipe", 2, 2, 2), [PartitionCost(1, 1, recompute=1)] * 2
    simulation = simulate(actions, costs, checkpoint_stops=[0, 2])
    # F0 F1 and back again on the second worker: 1 + 2 forwards, 2 recomputations and 2 backwards, and one more back.
    assert simulation.step == 1 + 2 + 2 * 2 + 1
    assert [span.phase for span in simulation.spans if span.worker == 0] == ["forward"] * 2 + ["backward"] * 2
    alive = partition_peaks(actions, [0, 2])
    assert [peaks.bytes(graph=10, input=1) for peaks in alive] == [20, 12]
