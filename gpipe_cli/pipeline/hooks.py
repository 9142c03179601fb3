"""Hooks on modules that a pipe never calls.

A pipe calls its layers one by one: a hook on the sequence they came from, or on the modules that show its partitions,
would never run. Decides that registering one is an error.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, final

from torch import nn

__all__ = ["refuse_hooks"]

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@final
class _NoHooks(OrderedDict[int, Any]):
    """In the place where torch keeps hooks."""

    what = "the module"

    def __setitem__(self, key: int, hook: Any) -> None:
        raise RuntimeError(
            f"a hook on {self.what} would never run: a pipe calls its layers one by one. Register it on a layer, "
            "pipe[i], or on the pipe itself"
        )


def refuse_hooks(module: nn.Module, what: str) -> None:
    """Raise if `module` has hooks, and let it raise when it is to get one."""
    for kind in _KINDS:
        if getattr(module, kind):
            raise ValueError(
                f"{what} has a hook, which would never run: a pipe calls its layers one by one. Register it on a "
                "layer instead"
            )
        none = _NoHooks()
        none.what = what
        setattr(module, kind, none)
