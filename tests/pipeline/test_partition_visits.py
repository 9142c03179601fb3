from __future__ import annotations

from gpipe_cli.pipeline.action_loop import partition_visits
from gpipe_cli.schedule import order


def test_each_slice_is_visited_twice_and_the_last_one_once() -> None:
    (actions,) = order("by_slice", 3, 2, 1)
    visits = partition_visits(actions)
    assert [visit.partition for visit in visits] == [0, 1, 2, 1, 0]
    assert [visit.completes_gradients for visit in visits] == [False, False, True, True, True]
    assert [str(action) for action in visits[2].actions] == ["F2.0", "F2.1", "B2.0", "B2.1"]


def test_visits_lose_no_action_and_complete_each_partition_once() -> None:
    for actions in order("interleaved", 6, 4, 2):
        visits = partition_visits(actions)
        assert tuple(action for visit in visits for action in visit.actions) == actions
        assert sorted(visit.partition for visit in visits if visit.completes_gradients) == sorted(
            {action.partition for action in actions}
        )
