"""Layers that only declare skips, for what is decided without running a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from gpipe_cli.skip import Skippable, skippable


@pytest.fixture
def layer() -> Callable[..., Skippable]:
    """Makes a layer that declares each letter as a name."""

    def declare(*, stash: str = "", pop: str = "") -> Skippable:
        return skippable(stash=list(stash), pop=list(pop))(type("Layer", (nn.Module,), {}))()

    return declare
