from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.schedule import Action, Kind, names, order, traits
from gpipe_cli.schedule.simulate import Live, PartitionCost, partition_peaks, peaks_of_live, simulate
from gpipe_cli.schedule.spec import PipelineSpec

costs_of_partitions = st.lists(
    st.builds(PartitionCost, st.integers(1, 50).map(float), st.integers(1, 50).map(float)),
    min_size=1,
    max_size=6,
)


def dependencies(action: Action, everything: frozenset[Action]) -> list[Action]:
    """The actions among `everything` that must have ended before this one can begin."""
    partition, micro_batch = action.partition, action.micro_batch
    match action.kind:
        case Kind.FORWARD:
            needed = [(Kind.FORWARD, partition - 1)]
        case Kind.WEIGHT_GRAD:
            needed = [(Kind.INPUT_GRAD, partition)]
        case Kind.BACKWARD | Kind.INPUT_GRAD:
            following = [(kind, partition + 1) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)]
            needed = [(Kind.FORWARD, partition), *following]
    return [
        needed_action for kind, of in needed if (needed_action := Action(kind, of, micro_batch)) in everything
    ]


@settings(max_examples=200)
@given(costs_of_partitions, st.integers(1, 12))
def test_gpipe_takes_what_its_closed_form_says(costs: list[PartitionCost], chunks: int) -> None:
    simulation = simulate(order("gpipe", len(costs), chunks, len(costs)), costs)
    forward, backward = [cost.forward for cost in costs], [cost.backward for cost in costs]
    closed = sum(forward) + (chunks - 1) * max(forward) + sum(backward) + (chunks - 1) * max(backward)
    assert simulation.step == pytest.approx(closed)


@given(costs_of_partitions, st.integers(1, 12), st.sampled_from(["gpipe", "1f1b"]))
def test_no_schedule_beats_its_busiest_partition(costs: list[PartitionCost], chunks: int, name: str) -> None:
    simulation = simulate(order(name, len(costs), chunks, len(costs)), costs)
    assert simulation.step >= chunks * max(cost.forward + cost.backward for cost in costs)
    assert 0 <= simulation.bubble < 1


@given(costs_of_partitions, st.integers(1, 8), st.integers(1, 3))
def test_never_do_more_actions_run_than_there_are_cores(
    costs: list[PartitionCost], chunks: int, cores: int
) -> None:
    simulation = simulate(order("gpipe", len(costs), chunks, len(costs)), costs, cores=cores)
    for span in simulation.spans:
        running = sum(other.begin <= span.begin < other.end for other in simulation.spans)
        assert running <= cores
    busy = sum(span.end - span.begin for span in simulation.spans)
    assert simulation.step >= busy / cores - 1e-9


def test_steps_of_small_pipelines_are_what_you_count_on_paper() -> None:
    assert simulate(order("1f1b", 1, 4, 1), [PartitionCost(1, 2)]).bubble == 0
    costs = [PartitionCost(1, 2), PartitionCost(3, 4)]
    assert simulate(order("1f1b", 2, 4, 2), costs, cores=1).step == 4 * 10
    # A transfer delays the neighbor only.
    costs = [PartitionCost(1, 1, transfer=5), PartitionCost(1, 1)]
    assert simulate(order("gpipe", 2, 1, 2), costs).step == 1 + 5 + 1 + 1 + 5 + 1
    # A split backward takes its parts, and halves where they are unknown.
    orders = order("zero_bubble", 1, 3, 1)
    assert simulate(orders, [PartitionCost(1, 4)]).step == 3 * 5
    assert simulate(orders, [PartitionCost(1, 4, input_grad=1, weight_grad=5)]).step == 3 * 7


def test_recomputation_hides_where_the_gradient_is_still_on_its_way() -> None:
    costs = [PartitionCost(1, 2, recompute=1), PartitionCost(1, 2, recompute=1)]
    actions = order("gpipe", 2, 1, 2)
    # Both recompute, but the first does so while the second works.
    assert simulate(actions, costs).step == 6
    simulation = simulate(actions, costs, checkpointed_counts=[1, 1])
    assert simulation.step == 7
    of_the_first = [(span.phase, span.begin, span.end) for span in simulation.spans if span.worker == 0]
    assert of_the_first == [("forward", 0, 1), ("recompute", 1, 2), ("backward", 5, 7)]
    # It keeps a core from others only while it runs.
    assert simulate(order("gpipe", 2, 3, 2), costs, checkpointed_counts=[3, 3], cores=1).step == 2 * 3 * 4


@given(costs_of_partitions, st.integers(1, 6), st.sampled_from(["gpipe", "1f1b", "zero_bubble"]), st.data())
def test_no_piece_begins_before_what_it_needs_has_arrived(
    costs: list[PartitionCost], chunks: int, name: str, data: st.DataObject
) -> None:
    stop, cores = data.draw(st.integers(0, chunks)), data.draw(st.integers(1, 6))
    actions = order(name, len(costs), chunks, len(costs))
    costs = [replace(cost, recompute=3.0, transfer=2.0) for cost in costs]
    simulation = simulate(actions, costs, checkpointed_counts=[stop] * len(costs), cores=cores)
    ends = {(span.action, span.phase): span.end for span in simulation.spans}
    for span in simulation.spans:
        for needed in dependencies(span.action, frozenset(action for action, _ in ends)):
            crosses = needed.partition != span.action.partition
            phase = "forward" if needed.kind is Kind.FORWARD else "backward"
            if span.phase != "recompute" or not crosses:
                assert span.begin >= ends[needed, phase] + (2 if crosses else 0)
    recomputed = {span.action.micro_batch for span in simulation.spans if span.phase == "recompute"}
    assert recomputed == set(range(stop))
    assert simulation.step == max(ends.values())


def test_the_most_a_partition_keeps_counts_graphs_inputs_and_what_is_always_there() -> None:
    costs = [PartitionCost(1, 2, saved_bytes=100, input_bytes=10, resident_bytes=1000)] * 2
    actions = order("1f1b", 2, 4, 2)
    assert simulate(actions, costs).peak_bytes == (1200, 1100)
    # Two inputs and the graph of one of them; at the end the last micro-batch's own graph as well.
    assert simulate(actions, costs, checkpointed_counts=[3, 3]).peak_bytes == (1210, 1110)
    assert simulate(actions, costs, checkpointed_counts=[4, 4]).peak_bytes == (1120, 1110)


def test_actions_of_a_worker_keep_their_order_and_do_not_overlap() -> None:
    simulation = simulate(order("interleaved", 4, 4, 2), [PartitionCost(1, 2)] * 4)
    for worker in range(2):
        spans = [span for span in simulation.spans if span.worker == worker]
        assert [span.begin for span in spans] == sorted(span.begin for span in spans)
        assert all(before.end <= after.begin for before, after in itertools.pairwise(spans))


def test_an_order_that_cannot_be_run_is_refused() -> None:
    whole = order("gpipe", 2, 1, 2)
    without_the_first = (tuple(action for action in whole[0] if action.kind is not Kind.FORWARD), whole[1])
    with pytest.raises(ValueError, match="cannot be run"):
        simulate(without_the_first, [PartitionCost(1, 1)] * 2)


def test_only_the_partition_that_recomputes_takes_longer_and_keeps_less() -> None:
    actions, costs = order("gpipe", 2, 2, 2), [PartitionCost(1, 1, recompute=1)] * 2
    simulation = simulate(actions, costs, checkpointed_counts=[0, 2])
    # F0 F1 and back again on the second worker: 1 + 2 forwards, 2 recomputations and 2 backwards, and one more back.
    assert simulation.step == 1 + 2 + 2 * 2 + 1
    assert [span.phase for span in simulation.spans if span.worker == 0] == ["forward"] * 2 + ["backward"] * 2
    alive = partition_peaks(actions, [0, 2])
    assert [peaks.bytes(graph=10, input=1) for peaks in alive] == [20, 12]


@pytest.mark.parametrize(
    ("name", "checkpoint_stop", "expected"),
    [
        ("gpipe", 8, [(1, 8)] * 4),
        # The last micro-batch's graph waits while the first one is recomputed.
        ("gpipe", 7, [(2, 7)] * 4),
        ("1f1b", 8, [(1, 4), (1, 3), (1, 2), (1, 1)]),
    ],
)
def test_checkpointed_micro_batches_keep_their_inputs_and_one_graph(
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
        for partition, stop in enumerate(spec.checkpointed_counts)
    ]
    for graph, input in ((100, 1), (1, 100), (1, 0), (7, 5)):
        counted = [peaks.bytes(graph, input) for peaks in spec.peaks]
        clocked = [peaks.bytes(graph, input) for peaks in by_formula]
        assert clocked == counted or checkpoint == "except_last"
        # The last micro-batch's graph may come when fewer of the others are left: by one graph it is at most off.
        assert all(low <= high <= low + graph for low, high in zip(counted, clocked, strict=True))
