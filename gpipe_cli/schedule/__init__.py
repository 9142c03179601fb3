"""Schedules as data: which worker runs which action in which order. No torch, no threads."""

from __future__ import annotations

from gpipe_cli.schedule.action import Action, Kind, Order, ScheduleModule, ScheduleTraits
from gpipe_cli.schedule.orders import names, order, traits

__all__ = ["Action", "Kind", "Order", "ScheduleModule", "ScheduleTraits", "names", "order", "traits"]
