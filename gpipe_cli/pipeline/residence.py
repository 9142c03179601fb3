"""What a worker says of its way through the partitions, so that they can be brought in for as long as they are needed.

A stay is a run of actions on one partition. Decides where stays begin and end; knows nothing of what is moved, or
where to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, final

from gpipe_cli.pipeline.boundary import Parcel
from gpipe_cli.schedule.action import Action, Kind

__all__ = ["Residence", "Stay", "stays"]


@final
@dataclass(frozen=True, slots=True)
class Stay:
    actions: tuple[Action, ...]
    completes: bool
    """Whether it holds the partition's last backward: after it, the partition's gradients are whole."""

    @property
    def partition(self) -> int:
        return self.actions[0].partition


class Residence(Protocol):
    """Where the partitions of one worker live while they are not worked on."""

    def staying(self, stay: Stay, following: Stay | None) -> AbstractContextManager[object]:
        """Inside, the partition is on the worker's device; `following` is where the worker goes next."""

    def put_away(self, parcel: Parcel) -> Callable[[], Parcel] | None:
        """Keep what a partition was given until it is asked for again; None where it may as well stay."""


def stays(actions: Sequence[Action]) -> list[Stay]:
    """The actions of one worker, cut where it goes on to another partition."""
    last = {action.partition: action for action in actions if action.kind is not Kind.FORWARD}
    runs = [tuple(run) for _, run in groupby(actions, key=lambda action: action.partition)]
    return [Stay(run, last.get(run[0].partition) in run) for run in runs]
