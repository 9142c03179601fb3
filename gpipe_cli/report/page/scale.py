"""Numbers to places on an axis, as shares of its length, and round numbers to mark. Knows nothing of their meaning."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

__all__ = ["Scale"]

MARKS = 5
"""About how many fit."""
SAME = 1e-9
"""Values that differ by less than this share are one value to the eye, and to the arithmetic of marks."""
TINY = 1e-200


@final
@dataclass(frozen=True)
class Scale:
    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, margin: float = 0.0) -> Scale:
        """All the values, with some room at both ends; a single one gets room of its own."""
        found = list(values)
        low, high = min(found), max(found)
        size = max(abs(low), abs(high))
        if high - low <= SAME * size or size < TINY:
            room = 0.5 * size if size >= TINY else 0.5
        else:
            room = margin * (high - low)
        return cls(low - room, high + room)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / MARKS
        power = 10.0 ** math.floor(math.log10(rough))
        between = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / between), math.floor(self.high / between)
        return [between * index for index in range(first, last + 1)]
