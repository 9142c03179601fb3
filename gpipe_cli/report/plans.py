"""Plans as a table for people, the best one first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.tables import print_rows

__all__ = ["print_device_memory", "print_plans"]

COLUMNS = {
    "balance": "balance",
    "chunks": "chunks",
    "schedule": "schedule",
    "checkpoint": "checkpoint",
    "predicted_ms": "predicted ms",
    "measured_ms": "measured ms",
    "error": "error",
    "samples_per_second": "samples/s",
    "bubble": "bubble",
    "predicted_peak_bytes": "peak memory",
    "limit": "limited by",
}
OPTIONAL = ("limited by", "samples/s", "bubble")
"""What gives way on a narrow terminal."""
LONGEST = 6
"""Entries of a balance that are shown."""


def print_plans(title: str, plans: Sequence[Mapping[str, Any]]) -> None:
    columns = [key for key in COLUMNS if any(key in plan for plan in plans)]
    print_rows(
        title,
        [COLUMNS[key] for key in columns],
        [[_cell(key, plan) for key in columns] for plan in plans],
        optional=OPTIONAL,
    )


def print_device_memory(memory: Sequence[Mapping[str, int]]) -> None:
    """Of the best plan; of many devices those that need most."""
    rows = sorted(enumerate(memory), key=lambda row: -row[1]["total_bytes"])[:LONGEST]
    keys = list(memory[0])
    print_rows(
        "memory of the best plan, by device",
        ["device", *(key.removesuffix("_bytes") for key in keys)],
        [
            [device, *(readable(key, one[key]) for key in keys)]
            for device, one in sorted(rows, key=lambda row: row[0])
        ],
    )


def _cell(key: str, plan: Mapping[str, Any]) -> str:
    value = plan.get(key)
    if value is None:
        return "-"
    if key == "balance":
        more = ",..." if len(value) > LONGEST else ""
        return f"[{','.join(map(str, value[:LONGEST]))}{more}]"
    if key == "checkpoint" and isinstance(value, list):
        return ", ".join(f"{len(list(alike))}x{mode}" for mode, alike in groupby(value))
    if key == "error":
        return f"{100 * value:+.1f} %"
    if key.endswith("_ms"):
        return f"{value:.1f}"
    if key == "schedule" and plan.get("engine") == "single":
        return "none"
    return readable(key, value)
