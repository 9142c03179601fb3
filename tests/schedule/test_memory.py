from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.schedule import Kind, names, order, traits
from gpipe_cli.schedule.simulate import Live, partition_peaks, peaks_of_live
from gpipe_cli.schedule.spec import PipelineSpec


@pytest.mark.parametrize(
    ("name", "checkpoint_stop", "expected"),
    [
        ("gpipe", 0, [(8, 0)] * 4),
        ("gpipe", 8, [(1, 8)] * 4),
        # The last micro-batch's graph waits while the first one is recomputed.
        ("gpipe", 7, [(2, 7)] * 4),
        ("1f1b", 0, [(4, 0), (3, 0), (2, 0), (1, 0)]),
        ("1f1b", 8, [(1, 4), (1, 3), (1, 2), (1, 1)]),
        ("zero_bubble", 0, [(4, 0)] * 4),
    ],
)
def test_schedules_keep_as_many_micro_batches_as_they_promise(
    name: str, checkpoint_stop: int, expected: list[tuple[int, int]]
) -> None:
    peaks = partition_peaks(order(name, 4, 8, 4), [checkpoint_stop] * 4)
    assert [peaks.moments for peaks in peaks] == [(Live(*pair),) for pair in expected]


def test_several_moments_are_kept_where_the_bytes_decide_which_is_worst() -> None:
    first = partition_peaks(order("1f1b", 2, 4, 2), [3, 3])[0]
    assert first.moments == (Live(2, 1), Live(1, 2))
    assert first.bytes(graph=100, input=10) == 210
    assert first.bytes(graph=100, input=100) == 300


@given(st.sampled_from(names()), st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.integers(0, 50))
def test_no_moment_needs_more(name: str, partitions: int, chunks: int, stop: int, input: int) -> None:
    """Against a count of the bytes themselves, action by action."""
    actions = order(name, partitions, chunks, partitions)
    peaks = [peaks.bytes(graph=20, input=input) for peaks in partition_peaks(actions, [stop] * partitions)]
    for partition, own in enumerate(actions):
        alive, most = 0, 0
        for action in own:
            checkpointed = action.micro_batch < stop
            if action.kind is Kind.FORWARD:
                alive += input if checkpointed else 20
            elif action.kind is not Kind.WEIGHT_GRAD and checkpointed:
                alive += 20
            most = max(most, alive)
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                alive -= 20 + checkpointed * input
        assert alive == 0
        assert peaks[partition] == most


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 24),
    st.sampled_from(["never", "except_last", "always"]),
)
def test_what_a_formula_gives_holds_for_the_listed_order(
    schedule: str, devices: int, turns: int, chunks: int, checkpoint: str
) -> None:
    partitions = devices * (turns if schedule == "interleaved" else 1)
    spec = PipelineSpec(schedule, partitions, chunks, checkpoint, devices)
    live = traits(schedule).live_micro_batches
    assert live is not None
    by_formula = [
        peaks_of_live(live(partition, partitions, chunks, devices), chunks, stop)
        for partition, stop in enumerate(spec.checkpoint_stops)
    ]
    for graph, input in ((100, 1), (1, 100), (1, 0), (7, 5)):
        counted = [peaks.bytes(graph, input) for peaks in spec.peaks]
        clocked = [peaks.bytes(graph, input) for peaks in by_formula]
        assert clocked == counted or checkpoint == "except_last"
        # The last micro-batch's graph may come when fewer of the others are left: by one graph it is at most off.
        assert all(low <= high <= low + graph for low, high in zip(counted, clocked, strict=True))
