"""Turn a model into layers by a list that its author writes, and divide layers into equal parts.

    layers = ["conv1", "bn1", "relu", "layer1", lambda x: torch.flatten(x, 1), "fc"]
    sequence = flatten_model(model, layers)

Nothing runs here: it is up to the author that the list computes what the model's own forward does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, final, overload

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.sequence import LayerSequence, named_tensors

Item: TypeAlias = str | nn.Module | Callable[..., Any]
"""A submodule's dotted name, a module, a function of the previous layer's output, or what makes a module: a class or
function without parameters, a functools.partial of a class, or a LayerSpec of DeepSpeed."""

_MAX_NAMES = 10
"""In a message."""

Layers = TypeVar("Layers", bound=Sequence[Any] | nn.Sequential)


@final
class FunctionLayer(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def listed_layers(items: Iterable[Item]) -> LayerSequence:
    """A sequence of modules, functions and factories, each of which is called where its layer belongs.

    It names layers as nn.Sequential does. Layers that share parameters, as DeepSpeed's TiedLayerSpec makes them, must
    hold the same module or parameter.
    """
    return LayerSequence(_listed(item, position) for position, item in enumerate(items))


def _listed(item: Any, position: int) -> nn.Module:
    item = _made(item)
    if isinstance(item, nn.Module):
        return item
    if callable(item):
        return FunctionLayer(item)
    raise TypeError(
        f"layer {position} is a {type(item).__name__} ({item!r}); give a module, a function or a factory"
    )


def _made(item: Any) -> Any:
    """The module that a factory makes; anything else as it is."""
    if isinstance(item, nn.Module):
        return item
    if type(item).__name__ == "TiedLayerSpec":
        raise TypeError(
            f"{item!r} is tied; make the module once, and list functions that call it or its parameter"
        )
    if callable(build := getattr(item, "build", None)):
        return build()
    kind = item.func if isinstance(item, partial) else item
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return item()
    is_factory = callable(item) and not isinstance(kind, type) and _takes_nothing(item)
    return item() if is_factory else item


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except ValueError:  # a function of C, which may not say what it takes
        return False


@final
@dataclass(frozen=True, slots=True)
class _ListedLayer:
    path: str
    module: nn.Module


@overload
def flatten_model(
    model: nn.Module,
    layer_list: Iterable[Item],
    return_list: Literal[False] = False,
    *,
    allow_unused: bool = False,
) -> LayerSequence: ...
@overload
def flatten_model(
    model: nn.Module, layer_list: Iterable[Item], return_list: Literal[True], *, allow_unused: bool = False
) -> list[nn.Module]: ...
def flatten_model(
    model: nn.Module, layer_list: Iterable[Item], return_list: bool = False, *, allow_unused: bool = False
) -> LayerSequence | list[nn.Module]:
    """Return the layers named in `layer_list` as a LayerSequence, or as a plain list.

    Every nn.Sequential and nn.ModuleList among them is replaced by its members.

    allow_unused: whether the layers may leave out parameters and buffers of the model, which are then not trained.
    """
    paths = {module: path for path, module in model.named_modules()}
    listed = [
        layer
        for position, item in enumerate(layer_list)
        for layer in _expanded(_layer(model, paths, item, position))
    ]
    layers = _distinct(listed)
    if not allow_unused:
        _check_complete(model, layers)
    if return_list:
        return [layer.module for layer in layers]
    sequence = LayerSequence([layer.module for layer in layers], paths=[layer.path for layer in layers])
    names = {sequence.original_key(key) for key, _ in named_tensors(sequence)}
    is_whole = names == {name for name, _ in named_tensors(model)}
    return LayerSequence(sequence, paths=sequence.paths, original=model) if is_whole else sequence


@overload
def partition_uniform(layers: Layers, partitions: int, index: None = None) -> list[Layers]: ...
@overload
def partition_uniform(layers: Layers, partitions: int, index: int) -> Layers: ...
def partition_uniform(layers: Layers, partitions: int, index: int | None = None) -> Layers | list[Layers]:
    """Divide layers into partitions whose lengths differ by at most one: 11 layers over 4 make 3, 3, 3, 2.

    Return all partitions, or only that of `index`. That of `gpipe_cli.distributed` divides as TorchDistPackage does.
    """
    if not 1 <= partitions <= len(layers):
        raise ConfigError(f"partitions={partitions}: must be from 1 to {len(layers)}, the number of layers")
    share, rest = divmod(len(layers), partitions)
    starts = [part * share + min(part, rest) for part in range(partitions + 1)]
    if index is None:
        return [_slice(layers, start, stop) for start, stop in pairwise(starts)]
    if not 0 <= index < partitions:
        raise ConfigError(f"index={index}: must be from 0 to {partitions - 1}, for {partitions} partitions")
    return _slice(layers, starts[index], starts[index + 1])


def _slice(layers: Layers, start: int, stop: int) -> Layers:
    part: Layers = layers[start:stop]  # type: ignore[assignment]  # a slice has the type of the whole
    return part


def _layer(model: nn.Module, paths: dict[nn.Module, str], item: Item, position: int) -> _ListedLayer:
    if isinstance(item, str):
        try:
            return _ListedLayer(item, model.get_submodule(item))
        except AttributeError as error:
            known = [path for path in paths.values() if path]
            near = get_close_matches(item, known, n=5) or [path for path in known if "." not in path]
            raise ConfigError(
                f"{type(model).__name__} has no submodule '{item}'; close names: {', '.join(near)}"
            ) from error
    item = _made(item)
    if isinstance(item, nn.Module):
        return _ListedLayer(paths.get(item, f"layer_{position}"), item)
    if callable(item):
        return _ListedLayer(f"layer_{position}", FunctionLayer(item))
    raise TypeError(
        f"layer {position} is a {type(item).__name__} ({item!r}); give the name of a submodule, a module or a function"
    )


def _expanded(layer: _ListedLayer) -> Iterator[_ListedLayer]:
    """Yield a container's members, expanded in turn; a subclass with a forward of its own stays whole."""
    module = layer.module
    runs_in_order = isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward
    if not runs_in_order:
        yield layer
        return
    for name, member in module.named_children():
        yield from _expanded(_ListedLayer(f"{layer.path}.{name}" if layer.path else name, member))


def _distinct(layers: list[_ListedLayer]) -> list[_ListedLayer]:
    """Copy a module that is listed twice, such as a ReLU: a pipeline could not tell the two layers apart."""
    holders: dict[nn.Module, str] = {}
    distinct = []
    for layer in layers:
        shared = next((module for module in layer.module.modules() if module in holders), None)
        if shared is None:
            distinct.append(layer)
        elif shared is layer.module and not [*named_tensors(layer.module)]:
            distinct.append(_ListedLayer(layer.path, copy.deepcopy(layer.module)))
        else:
            raise ConfigError(
                f"layer '{layer.path}' is listed twice (first in '{holders[shared]}') and has parameters or buffers; "
                "list it once, or use to_sequential(model, sample) instead of a list"
            )
        holders.update(dict.fromkeys(layer.module.modules(), layer.path))
    return distinct


def _check_complete(model: nn.Module, layers: list[_ListedLayer]) -> None:
    held = {id(tensor) for layer in layers for _, tensor in named_tensors(layer.module)}
    unused = [name for name, tensor in named_tensors(model) if id(tensor) not in held]
    if unused:
        more = f" and {len(unused) - _MAX_NAMES} more" if len(unused) > _MAX_NAMES else ""
        raise ConfigError(
            f"the layers leave out parameters or buffers of {type(model).__name__}: {', '.join(unused[:_MAX_NAMES])}"
            f"{more}; list the modules that hold them, or allow it with model.allow_unused=true (allow_unused=True in "
            "Python)"
        )
