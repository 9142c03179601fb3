"""The identity of a skip: a name within a namespace.

Skip names sort in the same order on every run and in every process that builds the same model.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from typing import final

_counter = itertools.count(1)


@final
@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Separates skips that share a name. Takes no arguments. A copy, pickled or not, equals its original."""

    number: int = field(default_factory=lambda: next(_counter), kw_only=True)
    """Creation order within the process; decides how namespaces sort."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True, repr=False)
    """Distinguishes namespaces that different processes created with the same number."""


DEFAULT_NAMESPACE = Namespace(number=0, token="")


@final
@dataclass(frozen=True, order=True, slots=True)
class SkipName:
    """The full name of a skip."""

    namespace: Namespace
    name: str
