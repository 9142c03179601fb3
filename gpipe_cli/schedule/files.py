"""Schedules as files: one order, with a line per worker, in a readable form or in that of torch's pipelining.

A file that ends in `.csv` has torch's form, `0F0,0F1,1I0,1W0`: partition, kind, micro-batch; torch writes a full
backward as B. Any other file has actions as gpipe prints them, `F0.0 F0.1 I1.0 W1.0`: kind, partition, micro-batch; `#`
begins a comment. Files may come from anybody: their size is bounded, and what they say is checked before it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import final

from gpipe_cli.errors import ConfigError
from gpipe_cli.safe_files import read_regular
from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleTraits
from gpipe_cli.schedule.order_check import check_order

MAX_ORDER_BYTES = 32 * 2**20
MAX_ACTIONS = 1_000_000
MAX_WORKERS = 4096
_TORCH = re.compile(r"(?P<partition>[0-9]{1,6})(?P<kind>[FBIW])(?P<micro_batch>[0-9]{1,6})")
_READABLE = re.compile(r"(?P<kind>[FBIW])(?P<partition>[0-9]{1,6})\.(?P<micro_batch>[0-9]{1,6})")


@final
@dataclass(frozen=True, eq=False)
class FixedOrder:
    """A schedule that is a single order: `GPipe(..., schedule=FixedOrder("mine", order))` runs it."""

    name: str
    given: Order

    def __post_init__(self) -> None:
        check_order(self.given, self.partitions, self.chunks, self.name)

    @cached_property
    def partitions(self) -> int:
        return 1 + max((action.partition for actions in self.given for action in actions), default=-1)

    @cached_property
    def chunks(self) -> int:
        return 1 + max((action.micro_batch for actions in self.given for action in actions), default=-1)

    @cached_property
    def TRAITS(self) -> ScheduleTraits:
        kinds = {action.kind for actions in self.given for action in actions}
        owners = {action.partition: worker for worker, actions in enumerate(self.given) for action in actions}
        return ScheduleTraits(
            name=self.name,
            splits_backward=Kind.INPUT_GRAD in kinds,
            several_per_device=self.partitions > len(self.given),
            workers=tuple(owners[partition] for partition in range(self.partitions)),
        )

    def order(self, partitions: int, chunks: int, devices: int) -> Order:
        """The order itself, for fewer micro-batches without the others, for more of them repeated.

        Both are legal: an action waits only for actions of its own micro-batch, which keep their order.
        """
        if (partitions, devices) != (self.partitions, len(self.given)):
            raise ValueError(
                f"schedule {self.name!r} is for {self.partitions} partitions on {len(self.given)} devices, "
                f"got {partitions} on {devices}"
            )
        return tuple(
            tuple(
                Action(action.kind, action.partition, first + action.micro_batch)
                for first in range(0, chunks, self.chunks)
                for action in actions
                if first + action.micro_batch < chunks
            )
            for actions in self.given
        )


def read_schedule(path: Path | str, *, base: Path | None = None) -> FixedOrder:
    """The checked schedule of a file; ConfigError names the file, the line and what is wrong.

    base: as for `open_regular`.
    """
    path = Path(path)
    try:
        text = read_regular(path, MAX_ORDER_BYTES, base=base).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name, or bytes that are not UTF-8
        raise ConfigError(f"{path}: cannot be read as a schedule: {error}") from error
    return parse_schedule(text, str(path), is_csv=path.suffix.lower() == ".csv")


def parse_schedule(text: str, path: str, *, is_csv: bool) -> FixedOrder:
    """The checked schedule of the content of a file; `path` names it in messages."""
    order: list[tuple[Action, ...]] = []
    left = MAX_ACTIONS
    for number, line in enumerate(text.splitlines(), start=1):
        written = line if is_csv else line.partition("#")[0]
        actions = tuple(islice(_actions(path, number, written, is_csv=is_csv), left + 1))
        left -= len(actions)
        if actions:
            order.append(actions)
        if left < 0 or len(order) > MAX_WORKERS:
            raise ConfigError(f"{path}: has more than {MAX_WORKERS:,} workers or {MAX_ACTIONS:,} actions")
    if not order:
        raise ConfigError(f"{path}: has no actions")
    return FixedOrder(path, tuple(order))


def _actions(path: str, number: int, line: str, *, is_csv: bool) -> Iterator[Action]:
    pattern, example = (_TORCH, "0F1") if is_csv else (_READABLE, "F0.1")
    for word in line.split(",") if is_csv else line.split():
        # torch leaves a cell empty where a rank waits.
        if not (word := word.strip()):
            continue
        match = pattern.fullmatch(word)
        if match is None:
            raise ConfigError(f"{path}, line {number}: {word[:40]!r} is not an action such as {example}")
        yield Action(Kind(match["kind"]), int(match["partition"]), int(match["micro_batch"]))


def torch_action(action: Action) -> str:
    """As torch writes it: partition, kind, micro-batch."""
    return f"{action.partition}{action.kind.value}{action.micro_batch}"


def schedule_text(order: Order, *, is_csv: bool) -> str:
    """The content of a file for the order: in torch's form, or readable."""
    if is_csv:
        rows = (",".join(map(torch_action, actions)) for actions in order)
    else:
        rows = (" ".join(map(str, actions)) for actions in order)
    return "".join(f"{row}\n" for row in rows)
