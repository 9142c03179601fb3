"""The generators of random numbers outside torch, which gpipe neither records nor keys."""

from __future__ import annotations

import random
import sys
from typing import Any


def generator_states() -> dict[str, Any]:
    """The states of the process-wide generators outside torch, by the name of their module."""
    states: dict[str, Any] = {"random": random.getstate()}
    # NumPy imports it at first use, perhaps in another thread at this moment.
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is not None:
        kind, keys, position, *rest = get_state()
        states["numpy.random"] = (kind, keys.tobytes(), position, *rest)
    return states
