"""`check` must see what is wrong: orders are damaged here in every way it claims to notice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.schedule import Action, Kind, Order, names, order
from gpipe_cli.schedule.order_check import IllegalOrder, check_order

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
sizes = st.integers(1, 5)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int, int]:
    partitions, chunks = draw(sizes), draw(sizes)
    name = draw(st.sampled_from(names()))
    devices = draw(st.integers(1, partitions)) if name == "interleaved" else partitions
    return order(name, partitions, chunks, devices), partitions, chunks


def changed(before: Order, worker: int, actions: list[Action]) -> Order:
    return (*before[:worker], tuple(actions), *before[worker + 1 :])


@given(orders(), st.data())
def test_a_dropped_action_is_noticed_by_name(made: tuple[Order, int, int], data: st.DataObject) -> None:
    before, partitions, chunks = made
    worker = data.draw(st.integers(0, len(before) - 1))
    place = data.draw(st.integers(0, len(before[worker]) - 1))
    after = changed(before, worker, [*before[worker][:place], *before[worker][place + 1 :]])
    dropped = before[worker][place]
    # Without its only I and W a partition's backward looks whole, so it is the B that is missed.
    instead = Action(BACKWARD, dropped.partition, dropped.micro_batch)
    with pytest.raises(IllegalOrder, match=f"^({dropped}|{instead}) is missing"):
        check_order(after, partitions, chunks)


@given(orders(), st.data())
def test_a_repeated_action_is_noticed_by_name(made: tuple[Order, int, int], data: st.DataObject) -> None:
    before, partitions, chunks = made
    worker = data.draw(st.integers(0, len(before) - 1))
    repeated = data.draw(st.sampled_from(before[worker]))
    with pytest.raises(IllegalOrder, match=f"^{repeated} stands in the order 2 times"):
        check_order(changed(before, worker, [*before[worker], repeated]), partitions, chunks)


@given(orders(), st.data())
def test_exchanging_two_actions_of_one_partition_and_kind_is_noticed(
    made: tuple[Order, int, int], data: st.DataObject
) -> None:
    before, partitions, chunks = made
    worker = data.draw(st.integers(0, len(before) - 1))
    actions = list(before[worker])
    first = data.draw(st.integers(0, len(actions) - 1))
    alike = [
        place
        for place, action in enumerate(actions)
        if (action.kind, action.partition) == (actions[first].kind, actions[first].partition)
        and place != first
    ]
    if alike:
        second = data.draw(st.sampled_from(alike))
        actions[first], actions[second] = actions[second], actions[first]
        with pytest.raises(IllegalOrder, match="micro-batches must ascend"):
            check_order(changed(before, worker, actions), partitions, chunks)


@given(orders())
def test_running_any_workers_actions_backwards_is_noticed(made: tuple[Order, int, int]) -> None:
    before, partitions, chunks = made
    for worker, actions in enumerate(before):
        with pytest.raises(IllegalOrder):
            check_order(changed(before, worker, list(reversed(actions))), partitions, chunks)


def test_a_descending_backward_is_refused_since_gradients_would_add_up_in_another_order() -> None:
    actions = (Action(FORWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1), Action(BACKWARD, 0, 0))
    with pytest.raises(IllegalOrder, match=re.escape("B0.0 comes after B0.1, micro-batches must ascend")):
        check_order((actions,), 1, 2)


def test_workers_that_wait_in_a_circle_are_named_with_what_they_wait_for() -> None:
    first = (Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1))
    second = (Action(FORWARD, 1, 0), Action(FORWARD, 1, 1), Action(BACKWARD, 1, 0), Action(BACKWARD, 1, 1))
    expected = "worker 0 needs B1.0 for B0.0; worker 1 needs F0.1 for F1.1"
    with pytest.raises(IllegalOrder, match=expected):
        check_order((first, second), 2, 2)


def test_a_backward_before_its_own_forward_is_refused() -> None:
    with pytest.raises(IllegalOrder, match=re.escape("worker 0 needs F0.0 for B0.0")):
        check_order(((Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0)),), 1, 1)


def test_a_partition_on_two_workers_is_refused() -> None:
    with pytest.raises(IllegalOrder, match=re.escape("B0.0 is on worker 1, its partition is on worker 0")):
        check_order(((Action(FORWARD, 0, 0),), (Action(BACKWARD, 0, 0),)), 1, 1)


def test_an_action_beyond_the_partitions_or_chunks_is_refused() -> None:
    for partitions, chunks in ((1, 2), (2, 1)):
        with pytest.raises(IllegalOrder, match=f"is beyond {partitions} partitions and {chunks} chunks"):
            check_order(order("gpipe", 2, 2, 2), partitions, chunks)


def actions_of(text: str) -> tuple[Action, ...]:
    """Of a partition 0: `F0 I0 W0`."""
    return tuple(Action(Kind(word[0]), 0, int(word[1:])) for word in text.split())


def test_a_partition_may_split_some_of_its_backwards() -> None:
    check_order((actions_of("F0 B0 F1 I1 F2 W1 B2 F3 I3 W3"),), 1, 4)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 F1 I0 B1 W0", "W0.0 comes after B0.1, micro-batches must ascend"),
        ("F0 B0 I0 W0", "I0.0 is done already"),
        ("F0 B0 F1 I1", "W0.1 is missing"),
        ("F0 B0 F1 W1", "I0.1 is missing"),
        ("F0 B0 F1", "B0.1 is missing"),
        ("F0 F1 B1", "B0.0 is missing"),
    ],
)
def test_mixed_backwards_are_summed_in_order_and_complete(order: str, message: str) -> None:
    with pytest.raises(IllegalOrder, match=f"^{re.escape(message)}"):
        check_order((actions_of(order),), 1, 2)
