"""Modules and tensors of a sequence by the paths they have in the model it was made from.

A layer may hold only a part of what stands below one path, so not every path has a module of its own: `at` gives a
stand-in for those, through which torch's own look-ups (`get_submodule`, `get_parameter`, `torch.func.functional_call`)
reach what stands below it. Knows nothing of pipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.sequential.sequence import Sequence

__all__ = ["at", "layer_paths"]


def layer_paths(module: nn.Sequential) -> tuple[str, ...]:
    """For each layer of any sequence, where its content stood in the original."""
    return module.paths if isinstance(module, Sequence) else tuple(dict(module.named_children()))


def at(module: nn.Sequential, path: str) -> nn.Module | Tensor | None:
    """What the original had at `path`; None if it had nothing there."""
    owners = list(_owners(module, path))
    inside = [found for layer, rest in owners if (found := _inside(layer, rest)) is not None]
    if len(inside) == 1 and not _is_divided(module, path):
        return inside[0]
    if inside or _is_divided(module, path):
        tensor = next((found for found in inside if isinstance(found, Tensor)), None)
        return _Part(module, path) if tensor is None else tensor
    return None


def _owners(module: nn.Sequential, path: str) -> Iterator[tuple[nn.Module, str]]:
    """The layers that may hold what stands at `path`, and where in them."""
    for layer, own in zip(module, layer_paths(module), strict=True):
        if path == own or not own or path.startswith(f"{own}."):
            yield layer, path.removeprefix(own).removeprefix(".")


def _is_divided(module: nn.Sequential, path: str) -> bool:
    """Whether what stood below `path` is in several layers."""
    below = [own for own in layer_paths(module) if own == path or own.startswith(f"{path}.")]
    return len(below) > 1 or any(own != path for own in below)


def _inside(layer: nn.Module, path: str) -> nn.Module | Tensor | None:
    found: Any = layer
    for name in filter(None, path.split(".")):
        found = found._modules.get(name) or _own_tensor(found, name) if isinstance(found, nn.Module) else None
        if found is None:
            return None
    return found if isinstance(found, nn.Module | Tensor) else None


def _own_tensor(module: nn.Module, name: str) -> Tensor | None:
    held = module._parameters.get(name)
    return module._buffers.get(name) if held is None else held


@final
class _Part(nn.Module):
    """Stands for a module of the original whose parts are in several layers."""

    def __init__(self, module: nn.Sequential, path: str) -> None:
        super().__init__()
        self.__dict__.update(_of=module, _path=path)

    def __getattr__(self, name: str) -> Any:
        found = at(self.__dict__["_of"], f"{self.__dict__['_path']}.{name}")
        if found is None:
            raise AttributeError(f"the model has nothing at '{self.__dict__['_path']}.{name}'")
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Give the layers that hold a tensor another one in its place, as torch.func.functional_call does."""
        if not isinstance(value, Tensor):
            super().__setattr__(name, value)
            return
        for layer, rest in _owners(self.__dict__["_of"], self.__dict__["_path"]):
            owner = _inside(layer, rest)
            if isinstance(owner, nn.Module):
                for held in (owner._parameters, owner._buffers):
                    if name in held:
                        held[name] = value  # type: ignore[assignment]
