"""Layers that only declare skips, for tests that do not run a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from gpipe_cli.skip import Skippable, skippable


@pytest.fixture
def layer() -> Callable[..., Skippable]:
    """Returns a function that makes a layer with each letter declared as a name."""

    def declare(*, stash: str = "", pop: str = "") -> Skippable:
        return skippable(stash=list(stash), pop=list(pop))(type("Layer", (nn.Module,), {}))()

    return declare
