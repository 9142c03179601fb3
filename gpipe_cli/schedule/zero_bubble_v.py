"""ZB-V (arXiv 2401.10241, section 6): split backward with two partitions per device, there and back.

A device has the first and the last partition, the next one the second and the last but one, and so on. Without
transfers and with equal times there is no bubble but the start, with the memory of 1f1b.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpipe_cli.schedule.action import Action, Kind, Order

NAME = "zero_bubble_v"


def order(partitions: int, chunks: int, devices: int) -> Order:
    if partitions != 2 * devices:
        raise ValueError(
            f"schedule {NAME!r} runs two partitions per device, got {partitions} for {devices} devices"
        )
    # The pattern needs that many micro-batches; what does not exist is left out.
    complete = max(chunks, 2 * devices - 1)
    return tuple(
        tuple(action for action in _actions(worker, complete, devices) if action.micro_batch < chunks)
        for worker in range(devices)
    )


def _actions(worker: int, chunks: int, devices: int) -> Iterator[Action]:
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
