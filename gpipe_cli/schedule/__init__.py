"""Schedules as data: which worker runs which action in which order. No torch, no threads.

To add a schedule, write a module with a function `order(partitions, chunks, devices)` and `TRAITS`, and a YAML file
in conf/schedule that names it. Everything else (checker, simulator, planner, engines, docs) asks its traits. The
modules of this folder are found by scanning it; any other one is named by its import path, such as
`mypackage.my_schedule`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Protocol, cast

from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleTraits
from gpipe_cli.schedule.check import check

__all__ = ["Action", "Kind", "Order", "ScheduleModule", "ScheduleTraits", "names", "order", "traits"]


class ScheduleModule(Protocol):
    @property
    def TRAITS(self) -> ScheduleTraits: ...

    def order(self, partitions: int, chunks: int, devices: int) -> Order: ...

    def __hash__(self) -> int: ...


def order(name: str | ScheduleModule, partitions: int, chunks: int, devices: int) -> Order:
    """The actions of each of `devices` workers that take `chunks` micro-batches through the partitions, checked."""
    schedule = _module(name)
    name = schedule.TRAITS.name if not isinstance(name, str) else name
    for label, number in {"partitions": partitions, "chunks": chunks, "devices": devices}.items():
        if number < 1:
            raise ValueError(f"schedule {name!r} needs at least one of {label}, got {number}")
    given = f"got {partitions} for {devices} devices"
    if not schedule.TRAITS.several_per_device and partitions != devices:
        several = ", ".join(map(repr, names(several_per_device=True)))
        cure = f"; {several} takes more partitions than devices" if partitions > devices else ""
        raise ValueError(f"schedule {name!r} runs one partition per device, {given}{cure}")
    if partitions < devices:
        raise ValueError(f"schedule {name!r} needs a partition for each device, {given}")
    made = schedule.order(partitions, chunks, devices)
    check(made, partitions, chunks, f"schedule={name}")
    return made


def traits(name: str | ScheduleModule) -> ScheduleTraits:
    """What a schedule declares about itself."""
    return _module(name).TRAITS


def names(*, several_per_device: bool | None = None) -> tuple[str, ...]:
    """The shipped schedules to choose from, sorted, or those that do or do not run several per device."""
    shipped = (module.TRAITS for module in _shipped().values())
    chosen = [
        traits.name
        for traits in shipped
        if not traits.engine_only and several_per_device in (None, traits.several_per_device)
    ]
    return tuple(sorted(chosen))


@functools.cache
def _shipped() -> Mapping[str, ScheduleModule]:
    modules = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    schedules = [cast(ScheduleModule, module) for module in modules if hasattr(module, "TRAITS")]
    return {schedule.TRAITS.name: schedule for schedule in schedules}


def _module(name: str | ScheduleModule) -> ScheduleModule:
    """A shipped schedule by its name, any other by its import path; an object that is a schedule is left as it is.

    Importing runs code. `config/checks.py` therefore checks first that the command line allows the module's package.
    """
    if not isinstance(name, str):
        return name
    if name in _shipped():
        return _shipped()[name]
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
