"""What moving slices has cost, to be told with the step it was for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["Transfers"]


@final
@dataclass(frozen=True)
class Transfers:
    moved_bytes: int
    """Both ways."""
    waited_seconds: float
    """By the thread that computes."""

    def since(self, before: Transfers) -> Transfers:
        return Transfers(self.moved_bytes - before.moved_bytes, self.waited_seconds - before.waited_seconds)
