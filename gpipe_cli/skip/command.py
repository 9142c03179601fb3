"""What a skippable layer's forward may yield. Commands only say what is wanted; `Skippable` does it.

In lower case, since they read as verbs: `yield stash("skip", tensor)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """`yield stash("skip", tensor)` keeps a tensor, or None, for the layer that pops it."""

    name: str
    value: Tensor | None

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor | None):
            raise TypeError(
                f"stash({self.name!r}, ...) takes a Tensor or None, got {type(self.value).__name__}"
            )


@final
@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """`tensor = yield pop("skip")` gives what was stashed under the name, once."""

    name: str
