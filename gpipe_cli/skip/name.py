"""What a skip is called: a name within a namespace.

Names are ordered, and in the same way on every run and in every process that builds the same model, so that
whoever goes through a set of skips does so in one order.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from typing import final

_numbers = itertools.count(1)


@final
@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Keeps apart skips of one name; made without arguments. A copy, pickled or not, equals its original."""

    number: int = field(default_factory=lambda: next(_numbers), kw_only=True)
    """How many were made before in this process: gives the order."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True, repr=False)
    """Tells apart namespaces that were made in different processes."""


DEFAULT = Namespace(number=0, token="")
"""Where skips are that nobody isolated."""


@final
@dataclass(frozen=True, order=True, slots=True)
class SkipName:
    namespace: Namespace
    name: str
