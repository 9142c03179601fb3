from __future__ import annotations

from gpipe_cli.pipeline.residence import stays
from gpipe_cli.schedule import order
from gpipe_cli.schedule.by_slice import order as by_slice
from gpipe_cli.schedule.check import check


def test_each_slice_is_entered_twice_and_the_last_one_once() -> None:
    (actions,) = by_slice(partitions=3, chunks=2)
    found = stays(actions)
    assert [stay.partition for stay in found] == [0, 1, 2, 1, 0]
    assert [stay.completes for stay in found] == [False, False, True, True, True]
    assert [str(action) for action in found[2].actions] == ["F2.0", "F2.1", "B2.0", "B2.1"]


def test_the_order_of_slices_is_a_legal_one() -> None:
    check(by_slice(partitions=3, chunks=2), partitions=3, chunks=2)


def test_stays_lose_no_action_and_complete_each_partition_once() -> None:
    for actions in order("interleaved", 6, 4, 2):
        found = stays(actions)
        assert tuple(action for stay in found for action in stay.actions) == actions
        assert sorted(stay.partition for stay in found if stay.completes) == sorted(
            {action.partition for action in actions}
        )
