"""Modules and tensors of a sequence by their paths in the original model.

A layer may hold only a part of what the original has below a path, so not every path has a module of its own.
`find_original` returns a stand-in for such a path, through which torch's own look-ups (`get_submodule`,
`get_parameter`, `torch.func.functional_call`) reach what is below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.sequential.sequence import Sequence


def layer_paths(module: nn.Sequential) -> tuple[str, ...]:
    """For each layer of any nn.Sequential the path of its content in the original."""
    return module.paths if isinstance(module, Sequence) else tuple(dict(module.named_children()))


def find_original(module: nn.Sequential, path: str) -> nn.Module | Tensor | None:
    """Return what the original has at `path`, or None."""
    candidates = (_member_at(layer, rest) for layer, rest in _layers_at(module, path))
    members = [member for member in candidates if member is not None]
    below = [own for own in layer_paths(module) if own == path or own.startswith(f"{path}.")]
    is_divided = len(below) > 1 or any(own != path for own in below)
    if len(members) == 1 and not is_divided:
        return members[0]
    if not members and not is_divided:
        return None
    tensor = next((member for member in members if isinstance(member, Tensor)), None)
    return _DividedModule(module, path) if tensor is None else tensor


def _layers_at(module: nn.Sequential, path: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers that may hold what the original has at `path`, and its path within each."""
    for layer, own in zip(module, layer_paths(module), strict=True):
        if path == own or not own or path.startswith(f"{own}."):
            yield layer, path.removeprefix(own).removeprefix(".")


def _member_at(layer: nn.Module, path: str) -> nn.Module | Tensor | None:
    member: nn.Module | Tensor | None = layer
    for name in filter(None, path.split(".")):
        if not isinstance(member, nn.Module):
            return None
        # Not getattr: that would also return plain attributes and properties. Not `or`: a tensor has no truth value.
        holders = (member._modules, member._parameters, member._buffers)
        member = next((held for holder in holders if (held := holder.get(name)) is not None), None)
    return member


@final
class _DividedModule(nn.Module):
    """Stands for a module of the original whose parts are in several layers."""

    def __init__(self, sequence: nn.Sequential, path: str) -> None:
        super().__init__()
        # Straight into __dict__: nn.Module would register the sequence as a child of this stand-in.
        self.__dict__.update(_sequence=sequence, _path=path)

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__dict__['_path']}.{name}"
        member = find_original(self.__dict__["_sequence"], path)
        if member is None:
            raise AttributeError(f"the model has nothing at '{path}'")
        return member

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a tensor in every layer that holds it, as torch.func.functional_call does."""
        if not isinstance(value, Tensor):
            super().__setattr__(name, value)
            return
        for layer, rest in _layers_at(self.__dict__["_sequence"], self.__dict__["_path"]):
            owner = _member_at(layer, rest)
            if isinstance(owner, nn.Module):
                for holder in (owner._parameters, owner._buffers):
                    if name in holder:
                        holder[name] = value  # type: ignore[assignment]
