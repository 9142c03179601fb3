"""Which modules stay whole in a trace: a layer calls them as the model does, and nothing looks into them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipe_cli.errors import ConfigError
from gpipe_cli.torch_internals.modules import runs_more_than_forward

_OF_TORCH = ("torch.nn.", "torch.ao.nn.")


@final
class Leaves:
    """The modules that stay whole.

    These are modules without children, so that attributes such as `p`, `eps` and `training` are read when the module
    runs; modules of torch.nn that are not containers; modules with hooks and compiled ones; those that the user chooses
    by path or class name; and those of which a recording would not repeat what they do.
    """

    def __init__(self, model: nn.Module, chosen: Iterable[str] = ()) -> None:
        names = frozenset([chosen] if isinstance(chosen, str) else chosen)
        self._modules = modules = dict(model.named_modules())
        known = {name for path, module in modules.items() for name in (path, type(module).__name__)}
        for name in sorted(names - known):
            near = get_close_matches(name, known) or sorted(path for path, _ in model.named_children())
            raise ConfigError(
                f"model.leaves: {type(model).__name__} has no submodule or class '{name}'; "
                f"close names: {', '.join(near)}"
            )
        self._whole = {
            path
            for path, module in modules.items()
            if path in names or type(module).__name__ in names or _is_leaf(module)
        }
        if type(model).__module__.startswith(_OF_TORCH) and not runs_more_than_forward(model):
            self._whole.discard("")
        if "" in self._whole:
            reason = (
                "has hooks or is compiled as a whole; put hooks on its blocks, and compile those, instead"
                if runs_more_than_forward(model)
                else "is a leaf itself; remove its class from model.leaves"
                if type(model).__name__ in names or "" in names
                else "has no submodules; write it as modules that call each other"
            )
            raise ConfigError(f"{type(model).__name__} cannot be cut: it {reason}")
        for path, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ConfigError(
                    f"{type(model).__name__} cannot be traced: '{path}' gets its shape from the first batch; give the "
                    "sizes of lazy modules, or call the model once on a batch before"
                )
        self._sizes = {path: _size(module) for path, module in modules.items()}

    def include(self, path: str) -> bool:
        return path in self._whole

    def may_keep_whole(self, path: str) -> bool:
        """Whether enough of the model is left to cut if the module at `path` is a leaf."""
        return bool(path) and path not in self._whole and 2 * self._sizes[path] <= self._sizes[""]

    def keep_whole(self, path: str) -> None:
        """Make a leaf of the module at `path`, and of all others of its class, which do the same."""
        kind = type(self._modules[path])
        self._whole |= {other for other, module in self._modules.items() if type(module) is kind}

    def outermost(self, path: str) -> str | None:
        """Return the path of the first leaf on the way down to the module at `path`."""
        parts = path.split(".") if path else []
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self._whole), None)


def remedy(model: nn.Module, path: str) -> str:
    """What helps against a module that cannot be traced, in the names of this model."""
    listed = ",".join(name for name, _ in model.named_children())
    layers = f"list the layers in the order in which they run, in the form 'model.layers=[{listed}]'"
    if not path:
        return f"move that code into a submodule, which may then stay whole, or {layers}"
    return f"keep it whole with 'model.leaves=[{type(model.get_submodule(path)).__name__}]', or {layers}"


def _is_leaf(module: nn.Module) -> bool:
    if runs_more_than_forward(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    childless = next(module.children(), None) is None
    return childless or type(module).__module__.startswith(_OF_TORCH)


def _size(module: nn.Module) -> int:
    """How many modules in it have parameters of their own."""
    return sum(any(True for _ in part.parameters(recurse=False)) for part in module.modules())
