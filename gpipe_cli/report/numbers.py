"""Numbers for people: per cent, units, few digits. Facts on disk and in JSON stay unrounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PER_CENT = ("top1", "top5", "accuracy", "mean_iou", "share", "bubble", "busy", "recompute")
COUNTS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def readable(name: str, value: Any) -> str:
    """A fact by its name: fractions as per cent, times and sizes with a unit, the rest short."""
    if value is None:
        return "-"
    if isinstance(value, str):  # text as it is, except for a count that was read from a file
        return readable(name, int(value)) if name == "parameters" and value.isdecimal() else value
    if name.endswith(PER_CENT):
        return f"{100 * value:.2f} %"
    if name == "seconds":
        return f"{value:.1f} s"
    if name.endswith("_ms"):
        return f"{value:.3f}"
    if name.endswith(("parameters", "flops")):
        return _scaled(value, COUNTS)
    if name.endswith("bytes"):
        return _scaled(value, BYTES, " ") + ("" if value >= BYTES[-1][1] else " B")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _scaled(value: float, units: Sequence[tuple[str, int]], space: str = "") -> str:
    """11181642 is 11.18M."""
    for unit, size in units:
        if value >= size:
            return f"{value / size:.2f}{space}{unit}"
    return str(value)
