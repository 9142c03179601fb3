"""The result of one check: a row with a verdict, what was measured, and what to do. An error becomes a row as well."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, final

import torch

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.errors import ResourceError
from gpipe_cli.report.formatting import describe
from gpipe_cli.safe_files import redacted

MEMORY_HINT = "end other processes that use the device, then run gpipe check again"
ERROR_HINT = "run gpipe check --debug for the traceback, and open an issue with both outputs"


class Verdict(StrEnum):
    """From best to worst."""

    SKIPPED = "skipped"
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@final
@dataclass(frozen=True)
class Row:
    name: str
    verdict: Verdict
    result: str
    """What was found, in one line."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The measured numbers, unrounded, for JSON."""
    to_do: str = ""
    """Empty if there is nothing to do."""

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


@final
@dataclass(frozen=True)
class Machine:
    """What to check: one device per worker, at least two workers."""

    workers: Sequence[torch.device]

    @staticmethod
    def of(devices: Sequence[torch.device]) -> Machine:
        """Two workers share a single device, so that there is a pipeline to check."""
        return Machine(list(devices) if len(devices) > 1 else [*devices, *devices])

    @property
    def devices(self) -> list[torch.device]:
        """Each device once."""
        return list(dict.fromkeys(self.workers))

    @property
    def accelerators(self) -> list[torch.device]:
        return [device for device in self.devices if is_accelerator(device)]


Check = Callable[[Machine], Iterable[Row]]


def run_check(name: str, check: Check, machine: Machine, *, debug: bool = False) -> Iterator[Row]:
    """The rows of a check; an error ends the check with a row of its own, and the next check can run."""
    try:
        with report_out_of_memory(hint=MEMORY_HINT):
            yield from check(machine)
    except Exception as error:  # noqa: BLE001 - a broken driver may raise anything, and that is the result
        if debug:
            traceback.print_exception(error)
        message = redacted(describe(error))
        to_do = MEMORY_HINT if isinstance(error, ResourceError) else ERROR_HINT
        yield Row(name, Verdict.PROBLEM, message.removesuffix(f"; {MEMORY_HINT}"), to_do=to_do)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several results together."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.OK)
