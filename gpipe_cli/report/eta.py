"""How long a run will take still, from its pace so far."""

from __future__ import annotations

import time
from typing import final

__all__ = ["Eta"]


@final
class Eta:
    """Time left, from the pace so far."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: float | None = None
        self._first = 0

    def after(self, step: int) -> str:
        now = time.monotonic()
        if self._began is None:  # the first step warms up and would promise too long a time
            self._began, self._first = now, step
            return "-"
        left = (now - self._began) / max(1, step - self._first) * (self._steps - step)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
