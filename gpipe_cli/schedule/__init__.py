"""Schedules as data: which worker runs which action in which order. No torch, no threads.

A schedule is a file of this folder with a `NAME` and a function `order(partitions, chunks, devices)`.
It is found by looking, so a new one is a new file and nothing else. (The name stands inside the file
because Python could not import a file called `1f1b`.)
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Protocol, cast

from gpipe_cli.schedule.action import Action, Kind, Order

__all__ = ["Action", "Kind", "Order", "names", "order"]


class Schedule(Protocol):
    """What a schedule's file offers."""

    NAME: str
    """A file that has OF_AN_ENGINE as well is not to be chosen: an engine goes by it."""

    def order(self, partitions: int, chunks: int, devices: int) -> Order: ...


def order(name: str, partitions: int, chunks: int, devices: int) -> Order:
    """The actions of each of `devices` workers that take `chunks` micro-batches through the partitions."""
    if name not in _schedules():
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(names())}")
    for word, number in {"partitions": partitions, "chunks": chunks, "devices": devices}.items():
        if number < 1:
            raise ValueError(f"schedule {name!r} needs at least one of {word}, got {number}")
    return _schedules()[name].order(partitions, chunks, devices)


def names() -> tuple[str, ...]:
    """Those to choose from, sorted."""
    return tuple(sorted(name for name, one in _schedules().items() if not hasattr(one, "OF_AN_ENGINE")))


@functools.cache
def _schedules() -> Mapping[str, Schedule]:
    files = [file.name for file in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{file}") for file in files]
    return {module.NAME: cast(Schedule, module) for module in modules if hasattr(module, "NAME")}
