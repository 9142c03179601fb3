"""The identity of a skip: a name within a namespace.

Skip names sort in the same order on every run and in every process that builds the same model.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple, final

_counter = itertools.count(1)


@final
@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Separates skips that share a name. Takes no arguments. A copy, pickled or not, equals its original."""

    number: int = field(default_factory=lambda: next(_counter), kw_only=True)
    """Creation order within the process; decides how namespaces sort."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True, repr=False)
    """Distinguishes namespaces that different processes created with the same number."""


@final
class SkipName(NamedTuple):
    """The full name of a skip. It unpacks: `for namespace, name in layer.stashable()`."""

    namespace: Namespace | None
    """None for a skip that no layer has isolated."""
    name: str

    def __lt__(self, other: SkipName) -> bool:  # type: ignore[override]  # only skip names are sorted together
        return self._order() < other._order()

    def _order(self) -> tuple[list[Namespace], str]:
        return ([] if self.namespace is None else [self.namespace], self.name)
