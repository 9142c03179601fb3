"""Numbers for people: per cent, units, few digits. Facts on disk and in JSON stay unrounded."""

from __future__ import annotations

from typing import Any

FRACTIONS = ("top1", "top5", "token_accuracy", "pixel_accuracy", "mean_iou")


def readable(name: str, value: Any) -> str:
    """A fact by its name: fractions as per cent, times with a unit, the rest short."""
    if value is None:
        return "-"
    if name in FRACTIONS:
        return f"{100 * value:.2f} %"
    if name == "seconds":
        return f"{value:.1f} s"
    if name == "parameters":
        return _count(int(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(value: int) -> str:
    """11181642 is 11.18M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return str(value)
