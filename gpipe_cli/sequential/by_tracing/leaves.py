"""Which modules stay whole when a model is traced, and which are looked into.

A module without children stays whole, so that what it holds besides tensors (p, eps, training) is read when
it runs; so does every module of torch.nn that is no container, and what the user names.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import final

from torch import nn

from gpipe_cli.errors import ConfigError

__all__ = ["Leaves"]


@final
class Leaves:
    def __init__(self, model: nn.Module, chosen: Iterable[str] = ()) -> None:
        """`chosen` are dotted paths or names of classes."""
        self._chosen = frozenset([chosen] if isinstance(chosen, str) else chosen)
        known = {name for path, module in model.named_modules() for name in (path, type(module).__name__)}
        for name in sorted(self._chosen - known):
            near = get_close_matches(name, known) or sorted(path for path, _ in model.named_children())
            raise ConfigError(
                f"model.leaves: {type(model).__name__} has no submodule or class '{name}'; "
                f"close names: {', '.join(near)}"
            )

    def include(self, module: nn.Module, path: str) -> bool:
        if path in self._chosen or type(module).__name__ in self._chosen:
            return True
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return False
        childless = next(module.children(), None) is None
        return childless or type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))

    def outermost(self, model: nn.Module, path: str) -> str | None:
        """The first leaf on the way down from `model` to the module at `path`."""
        parts = path.split(".") if path else []
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if self.include(model.get_submodule(prefix), prefix):
                return prefix
        return None
