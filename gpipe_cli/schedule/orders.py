"""The built-in orders and their table, from which every part of gpipe gets a schedule by its name.

To add a schedule, add its order and its traits to `BUILT_IN`, and a YAML file to conf/schedule that names it.
Everything else (checker, simulator, planner, engines, docs) asks the traits. A custom schedule is a module with a
function `order(partitions, chunks, devices)` and `TRAITS`, named by its import path, such as `mypackage.my_schedule`.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast, final

from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleModule, ScheduleTraits
from gpipe_cli.schedule.order_check import check_order

GPIPE, ONE_F_ONE_B, ZERO_BUBBLE, INTERLEAVED, BY_SLICE = (
    "gpipe",
    "1f1b",
    "zero_bubble",
    "interleaved",
    "by_slice",
)
ZERO_BUBBLE_V = "zero_bubble_v"
"""Not a schedule to choose: only a search and the self-test of a machine use its order."""
AUTO, FILE = "auto", "file"
CUSTOM = (AUTO, FILE)
"""Custom schedules, whose order is data: searched for, or read. It becomes a `FixedOrder` before anything runs it."""


@final
@dataclass(frozen=True)
class _BuiltIn:
    TRAITS: ScheduleTraits
    order: Callable[[int, int, int], Order]


def order(name: str | ScheduleModule, partitions: int, chunks: int, devices: int) -> Order:
    """The actions of each of `devices` workers that take `chunks` micro-batches through the partitions, checked."""
    schedule = _schedule(name)
    name = schedule.TRAITS.name if not isinstance(name, str) else name
    for label, number in {"partitions": partitions, "chunks": chunks, "devices": devices}.items():
        if number < 1:
            raise ValueError(f"schedule {name!r} needs at least one of {label}, got {number}")
    given = f"got {partitions} for {devices} devices"
    if not schedule.TRAITS.several_per_device and partitions != devices:
        several = ", ".join(map(repr, names(several_per_device=True)))
        hint = f"; {several} takes more partitions than devices" if partitions > devices else ""
        raise ValueError(f"schedule {name!r} runs one partition per device, {given}{hint}")
    if partitions < devices:
        raise ValueError(f"schedule {name!r} needs a partition for each device, {given}")
    made = schedule.order(partitions, chunks, devices)
    check_order(made, partitions, chunks, f"schedule={name}")
    return made


def traits(name: str | ScheduleModule) -> ScheduleTraits:
    """What a schedule declares about itself."""
    return _schedule(name).TRAITS


def names(*, several_per_device: bool | None = None) -> tuple[str, ...]:
    """The built-in schedules to choose from, sorted, or those that do or do not run several per device."""
    chosen = [
        name
        for name, schedule in BUILT_IN.items()
        if not schedule.TRAITS.engine_only
        and several_per_device in (None, schedule.TRAITS.several_per_device)
    ]
    return tuple(sorted(chosen))


def _schedule(name: str | ScheduleModule) -> ScheduleModule:
    """A built-in schedule by its name, any other by its import path; an object that is a schedule is left as it is.

    Importing runs code. `config/checks.py` therefore checks first that the command line allows the module's package.
    """
    if not isinstance(name, str):
        return name
    if name in BUILT_IN:
        return BUILT_IN[name]
    unknown = (
        f"unknown schedule {name!r}; choose one of {', '.join(names())}, or give the name of your module"
    )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(unknown)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{unknown} ({error})") from error
    if not isinstance(getattr(module, "TRAITS", None), ScheduleTraits) or not hasattr(module, "order"):
        raise ValueError(f"{unknown}; module {name!r} does not define TRAITS and order")
    return cast(ScheduleModule, module)


def may_share_devices(schedule: str) -> bool:
    """Whether several partitions may be on one device."""
    return schedule in CUSTOM or traits(schedule).several_per_device


def similar_schedule(partitions: int, devices: int) -> str:
    """The schedule that a custom order is compared with, and that stands for it until there is one."""
    return ONE_F_ONE_B if partitions == devices else INTERLEAVED


def _staggered(partition: int, chunks: int, delays: Mapping[Kind, int]) -> tuple[Action, ...]:
    """A partition's actions in rounds: in round `r`, each kind runs micro-batch `r - delay`, if that exists."""
    # Kinds within a round run in the order of `delays`: with a delay of 0 a backward follows its own forward.
    return tuple(
        Action(kind, partition, now - delay)
        for now in range(chunks + max(delays.values()))
        for kind, delay in delays.items()
        if 0 <= now - delay < chunks
    )


def _gpipe(partitions: int, chunks: int, devices: int) -> Order:
    """The order of the GPipe paper: all forwards, then all backwards.

    Simple, and every activation of the mini-batch is alive in between. Unlike the paper's, the backward runs the
    micro-batches in ascending order, as every schedule here does, so that gradients are always summed in one order.
    """
    delays = {Kind.FORWARD: 0, Kind.BACKWARD: chunks}
    return tuple(_staggered(partition, chunks, delays) for partition in range(partitions))


def _one_f_one_b(partitions: int, chunks: int, devices: int) -> Order:
    """One forward, one backward: a backward runs as soon as it can, so that few activations are alive.

    The bubble is that of `gpipe`; partition `p` keeps min(chunks, partitions - p) micro-batches alive, not all.
    """
    # The first gradient comes from the last partition, that many partitions further on. With fewer forwards before it
    # a worker would sit idle until then; more would only keep more activations alive.
    return tuple(
        _staggered(partition, chunks, {Kind.FORWARD: 0, Kind.BACKWARD: partitions - 1 - partition})
        for partition in range(partitions)
    )


def _zero_bubble(partitions: int, chunks: int, devices: int) -> Order:
    """Split backward (ZB-H1, arXiv 2401.10241): weight gradients fill the gaps of waiting for input gradients.

    Only the input gradient travels back to the first partition, so it runs where `1f1b` runs the backward. The weight
    gradients lag so far behind that every partition keeps `partitions` micro-batches alive, as many as the first one
    does under `1f1b`: the later a partition, the more weight gradients are left for the gaps at the end.
    """
    last = partitions - 1
    return tuple(
        _staggered(
            partition, chunks, {Kind.FORWARD: 0, Kind.INPUT_GRAD: last - partition, Kind.WEIGHT_GRAD: last}
        )
        for partition in range(partitions)
    )


def _by_slice(partitions: int, chunks: int, devices: int) -> Order:
    """The order for a single worker that holds one partition at a time: all micro-batches, then the next partition.

    engine=offload uses it; it has no parallel work, so users cannot choose it. The worker enters each partition twice,
    the last one once, and runs backward in ascending micro-batch order as everywhere.
    """
    if devices != 1:
        raise ValueError(f"schedule {BY_SLICE!r} runs on one device, got {devices}")
    forwards = [Action(Kind.FORWARD, slice, chunk) for slice in range(partitions) for chunk in range(chunks)]
    backwards = [
        Action(Kind.BACKWARD, slice, chunk)
        for slice in reversed(range(partitions))
        for chunk in range(chunks)
    ]
    return ((*forwards, *backwards),)


def _interleaved(partitions: int, chunks: int, devices: int) -> Order:
    """1f1b with several partitions per device, dealt round robin (arXiv 2104.04473): less bubble, more traffic.

    A device takes its partitions in turn, `devices` micro-batches at a time: so many keep every device busy until the
    first one returns for the next partition. Each action has a tick on a clock, and a worker runs its actions in the
    order of their ticks. Whatever an action waits for has an earlier tick, so workers never wait in a circle: neither
    chunks nor partitions need be a multiple of devices. The order is that of Megatron-LM and of torch's
    ScheduleInterleaved1F1B.
    """

    def actions(worker: int) -> list[Action]:
        return [
            Action(kind, partition, micro_batch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for partition in range(worker, partitions, devices)
            for micro_batch in range(chunks)
        ]

    return tuple(
        tuple(sorted(actions(worker), key=lambda action: _tick(action, partitions, devices)))
        for worker in range(devices)
    )


def _tick(action: Action, partitions: int, devices: int) -> int:
    """Two ticks per slot, one for a forward and one for a backward.

    A slot belongs to one micro-batch on one of a device's partitions. The last partition turns round: its first
    backward is one tick after its first forward.
    """
    turn, worker = divmod(action.partition, devices)
    last_turn, last_worker = divmod(partitions - 1, devices)
    group, position = divmod(action.micro_batch, devices)
    # The next device has a whole slot of slack: with one tick, each transfer would delay it, in every round. The slack
    # costs a longer warm-up, and so more live micro-batches. With one partition per device this is 1f1b, without it.
    hop = 2 if last_turn else 1

    def slot(turn: int) -> int:
        return (group * (last_turn + 1) + turn) * devices + position

    if action.kind is Kind.FORWARD:
        return 2 * slot(turn) + hop * worker
    turning_point = 2 * last_turn * devices + hop * last_worker
    return turning_point + 1 + 2 * slot(last_turn - turn) + hop * (last_worker - worker)


def _live_interleaved(partition: int, partitions: int, chunks: int, devices: int) -> int:
    """The most forwards of a partition that have an earlier tick than the backward of an earlier micro-batch."""

    def forwards_before(backward: int) -> int:
        return bisect_left(
            range(chunks),
            _tick(Action(Kind.BACKWARD, partition, backward), partitions, devices),
            key=lambda number: _tick(Action(Kind.FORWARD, partition, number), partitions, devices),
        )

    # The clock repeats with every round of one micro-batch per device. Within a round forwards and backwards advance
    # at the same pace, so the maximum is at the ends of a round.
    ends_of_rounds = {0, 1, devices - 1, devices, 2 * devices - 1, 2 * devices}
    return max(forwards_before(number) - number for number in ends_of_rounds if number < chunks)


BUILT_IN: Mapping[str, ScheduleModule] = {
    schedule.TRAITS.name: schedule
    for schedule in (
        _BuiltIn(
            ScheduleTraits(
                name=GPIPE,
                torch_schedule="ScheduleGPipe",
                ticks_per_micro_batch=1,
                live_micro_batches=lambda partition, partitions, chunks, devices: chunks,
            ),
            _gpipe,
        ),
        _BuiltIn(
            ScheduleTraits(
                name=ONE_F_ONE_B,
                torch_schedule="Schedule1F1B",
                ticks_per_micro_batch=2,
                live_micro_batches=lambda partition, partitions, chunks, devices: min(
                    chunks, partitions - partition
                ),
            ),
            _one_f_one_b,
        ),
        _BuiltIn(
            ScheduleTraits(
                name=ZERO_BUBBLE, splits_backward=True, torch_schedule="ScheduleInterleavedZeroBubble"
            ),
            _zero_bubble,
        ),
        _BuiltIn(
            ScheduleTraits(
                name=INTERLEAVED,
                several_per_device=True,
                torch_schedule="ScheduleInterleaved1F1B",
                ticks_per_micro_batch=2,
                live_micro_batches=_live_interleaved,
            ),
            _interleaved,
        ),
        _BuiltIn(ScheduleTraits(name=BY_SLICE, several_per_device=True, engine_only=True), _by_slice),
    )
}


def one_by_one(partitions: int, chunks: int, devices: int) -> Order:
    """Each micro-batch forward and backward before the next: no order keeps less."""

    def actions(worker: int) -> Iterator[Action]:
        own = range(worker, partitions, devices)
        for micro_batch in range(chunks):
            yield from (Action(Kind.FORWARD, partition, micro_batch) for partition in own)
            yield from (Action(Kind.BACKWARD, partition, micro_batch) for partition in reversed(own))

    return tuple(tuple(actions(worker)) for worker in range(devices))


def zero_bubble_v(partitions: int, chunks: int, devices: int) -> Order:
    """ZB-V (arXiv 2401.10241, section 6): split backward with two partitions per device, there and back.

    A device has the first and the last partition, the next one the second and the last but one, and so on. Without
    transfers and with equal times there is no bubble but the start, with the memory of 1f1b.
    """
    if partitions != 2 * devices:
        raise ValueError(
            f"schedule {ZERO_BUBBLE_V!r} runs two partitions per device, got {partitions} for {devices} devices"
        )
    # The pattern needs that many micro-batches; what does not exist is left out.
    complete = max(chunks, 2 * devices - 1)
    return tuple(
        tuple(action for action in _v_actions(worker, complete, devices) if action.micro_batch < chunks)
        for worker in range(devices)
    )


def _v_actions(worker: int, chunks: int, devices: int) -> Iterator[Action]:
    down, up = worker, 2 * devices - 1 - worker
    done = {(kind, partition): 0 for kind in Kind for partition in (down, up)}

    def run(partition: int, letters: str) -> Iterator[Action]:
        for kind in map(Kind, letters):
            yield Action(kind, partition, done[kind, partition])
            done[kind, partition] += 1

    following = devices - worker
    yield from run(down, "F" * (2 * following - 1))
    for _ in range(worker):
        yield from run(up, "F")
        yield from run(down, "F")
    for _ in range(following):
        yield from run(up, "FIW")
    while done[Kind.FORWARD, up] < chunks:
        yield from run(down, "FIW" if done[Kind.FORWARD, down] < chunks else "IW")
        yield from run(up, "FIW")
    for _ in range(worker):
        yield from run(down, "I")
        yield from run(up, "I")
    for _ in range(following):
        yield from run(down, "IW")
    yield from run(up, "W" * (chunks - done[Kind.WEIGHT_GRAD, up]))
    yield from run(down, "W" * (chunks - done[Kind.WEIGHT_GRAD, down]))
