"""Bytes as people write them: 11GiB is 11 * 2**30, 11GB is 11 * 10**9."""

from __future__ import annotations

import math
import re

UNITS = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", 1)},
}
EXAMPLES = "a number of bytes such as 11GiB, 800MB or 4096"


def byte_count(text: object) -> int:
    """What `text` stands for; raises ValueError where it stands for no positive number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(text).strip())
    units = {name.lower(): size for name, size in UNITS.items()}
    size = units.get(found[2].lower() or "b") if found else None
    if found is None or size is None or (count := int(float(found[1]) * size)) < 1:
        raise ValueError(f"expected {EXAMPLES}")
    return count


def byte_text(count: float) -> str:
    """In the largest unit that keeps it above one, rounded up: a limit given so is large enough."""
    name, size = max(
        ((name, size) for name, size in UNITS.items() if "i" in name and size <= count),
        key=lambda unit: unit[1],
        default=("B", 1),
    )
    return f"{math.ceil(100 * count / size) / 100:g}{name}" if size > 1 else f"{math.ceil(count)}B"
