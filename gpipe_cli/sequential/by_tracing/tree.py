"""Puts parts of a model into a layer under their original dotted paths.

What stood between the model and such a part becomes a Branch: an empty module that has the name and the
`training` of the original. Knows nothing of graphs.
"""

from __future__ import annotations

import copy
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.torch_internals.state_version import adopt_version

__all__ = ["Branch", "Planter"]


@final
class Branch(nn.Module):
    """What is left of a module whose parts were shared out among layers."""


@final
class Planter:
    """Plants parts of one model into its layers, one layer after the other."""

    def __init__(self, model: nn.Module, clone: nn.Module) -> None:
        self._model = model
        self._clone = clone
        self._persistent = frozenset(model.state_dict(keep_vars=True))
        self._planted: dict[nn.Module, nn.Module] = {}

    def branch(self, layer: nn.Module, path: str) -> nn.Module:
        """The module at `path` in the layer, made of branches where there was none."""
        here, there = layer, self._model
        for name in path.split(".") if path else ():
            there = there.get_submodule(name)
            if not hasattr(here, name):
                new = Branch()
                new.training = there.training
                adopt_version(new, there)
                here.add_module(name, new)
            here = here.get_submodule(name)
        return here

    def module(self, layer: nn.Module, path: str) -> None:
        parent, _, name = path.rpartition(".")
        branch = self.branch(layer, parent)
        if not hasattr(branch, name):
            branch.add_module(name, self._own(layer, self._model.get_submodule(path)))

    def attribute(self, layer: nn.Module, path: str) -> None:
        """A parameter, a buffer, or whatever else the model has there; `training` every branch has."""
        parent, _, name = path.rpartition(".")
        branch = self.branch(layer, parent)
        if hasattr(branch, name):
            return
        owner = self._model.get_submodule(parent)
        # What tracing made a constant of is at the root of the clone only.
        value: Any = getattr(owner if hasattr(owner, name) else self._clone, name)
        if isinstance(value, nn.Parameter):
            branch.register_parameter(name, value)
        elif isinstance(value, Tensor) and name in dict(owner.named_buffers(recurse=False)):
            branch.register_buffer(name, value, persistent=path in self._persistent)
        else:
            setattr(branch, name, value)

    def _own(self, layer: nn.Module, module: nn.Module) -> nn.Module:
        """The module itself for the first layer that asks; the others get replicas with the same tensors.

        A pipe lends each partition aliases of shared parameters by writing them into its modules.
        """
        if any(self._planted.setdefault(part, layer) is not layer for part in module.modules()):
            return _replica(module)
        return module


def _replica(module: nn.Module) -> nn.Module:
    """Another module object with the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
