"""`check_order` must see what is wrong: orders are damaged here in every way it claims to notice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.schedule import Action, Kind, Order, names, order
from gpipe_cli.schedule.order_check import IllegalOrder, check_order

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
    instead = Action(Kind.BACKWARD, dropped.partition, dropped.micro_batch)
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


def order_of(text: str) -> Order:
    """An order with a line per worker: `F0.0 I0.0 W0.0`."""
    pattern = re.compile(r"([FBIW])(\d)\.(\d)")
    lines = ([pattern.fullmatch(word) for word in line.split()] for line in text.split("|"))
    return tuple(
        tuple(Action(Kind(each[1]), int(each[2]), int(each[3])) for each in line if each is not None)
        for line in lines
    )


def test_a_partition_may_split_some_of_its_backwards() -> None:
    check_order(order_of("F0.0 B0.0 F0.1 I0.1 F0.2 W0.1 B0.2 F0.3 I0.3 W0.3"), 1, 4)


@pytest.mark.parametrize(
    ("order", "partitions", "chunks", "message"),
    [
        # Gradients would add up in another order.
        ("F0.0 F0.1 B0.1 B0.0", 1, 2, "B0.0 comes after B0.1, micro-batches must ascend"),
        (
            "F0.0 B0.0 F0.1 B0.1 | F1.0 F1.1 B1.0 B1.1",
            *(2, 2),
            "the workers wait for each other: worker 0 needs B1.0 for B0.0; worker 1 needs F0.1 for F1.1",
        ),
        ("B0.0 F0.0", 1, 1, "the workers wait for each other: worker 0 needs F0.0 for B0.0"),
        ("F0.0 | B0.0", 1, 1, "B0.0 is on worker 1, its partition is on worker 0"),
        ("F0.0 B0.0 | F1.0 B1.0", 1, 2, "F1.0 is beyond 1 partitions and 2 chunks"),
        ("F0.0 F0.1 B0.0 B0.1", 1, 1, "F0.1 is beyond 1 partitions and 1 chunks"),
        ("F0.0 F0.1 I0.0 B0.1 W0.0", 1, 2, "W0.0 comes after B0.1, micro-batches must ascend"),
        ("F0.0 B0.0 I0.0 W0.0", 1, 2, "I0.0 is done already"),
        ("F0.0 B0.0 F0.1 I0.1", 1, 2, "W0.1 is missing"),
        ("F0.0 B0.0 F0.1 W0.1", 1, 2, "I0.1 is missing"),
        ("F0.0 B0.0 F0.1", 1, 2, "B0.1 is missing"),
        ("F0.0 F0.1 B0.1", 1, 2, "B0.0 is missing"),
    ],
)
def test_an_order_that_is_not_legal_is_refused_with_the_action_at_fault(
    order: str, partitions: int, chunks: int, message: str
) -> None:
    with pytest.raises(IllegalOrder, match=f"^{re.escape(message)}"):
        check_order(order_of(order), partitions, chunks)
