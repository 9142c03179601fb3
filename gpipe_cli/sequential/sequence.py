"""A sequence of layers that keeps the names of the model it was made from.

Layers are children named "0", "1", ... as in any nn.Sequential, because a child's name cannot contain a dot and a
cut may go through a nested module. The content of a layer keeps its place relative to a *path* of the original
model: the layer at path "layer1.2" holds "conv1.weight" where the original has "layer1.2.conv1.weight", and a layer
at path "" holds parts of the root under their own names. So one path per layer maps every layer key ("3.conv1.weight")
to its original name.

`state_dict`, `load_state_dict`, `named_parameters` and `named_buffers` use the original names in the original order.
`named_modules` and `get_submodule` use layer keys, so that they agree with each other. Inside a larger module the
state_dict still has the original names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, final, overload

from torch import Tensor, nn

from gpipe_cli.pytree import SINGLE, Template, unflatten
from gpipe_cli.torch_internals.modules import adopt_version, repeat_versions

Member = TypeVar("Member", bound=Tensor)
NO_TEMPLATES: Mapping[bool, Template] = MappingProxyType({})


@final
class LayerSequence(nn.Sequential):
    """nn.Sequential with the keys of the original model.

    layers: the layers in the order they run.
    paths: where the content of each layer is in the original; by default the layer's index.
    names: what to call each layer in messages; by default its path, or its index if the path is empty.
    original: read once, for the order of its names and to check that none is lost; by default names are in layer order.
    output_templates: how to build what the original returns from the tuple of tensors that the last layer returns, in
        training (True) and in evaluation (False); by default the sequence returns the output of its last layer.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        paths: Iterable[str] | None = None,
        names: Iterable[str] | None = None,
        original: nn.Module | None = None,
        output_templates: Mapping[bool, Template] = NO_TEMPLATES,
    ) -> None:
        super().__init__(*layers)
        self.output_templates = dict(output_templates)
        indices = [str(index) for index in range(len(self))]
        self.paths = tuple(indices if paths is None else paths)
        _check_length("paths", self.paths, len(self))
        default_names = (path or index for path, index in zip(self.paths, indices, strict=True))
        self.layer_names = tuple(default_names if names is None else names)
        _check_length("names", self.layer_names, len(self))
        _check_no_collisions(self)
        self._positions: dict[str, int] = {}
        if original is not None:
            names_in_order = (name for name, _ in named_tensors(original))
            self._positions = {name: position for position, name in enumerate(names_in_order)}
            _check_completeness(self, self._positions)
            self.training = original.training
            adopt_version(self, original)
        self.register_state_dict_post_hook(_save_original_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_original_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_original_names)  # type: ignore[no-untyped-call]
        self.load_in_progress: _Load | None = None

    def forward(self, input: Any) -> Any:
        return original_output(self, super().forward(input))  # type: ignore[no-untyped-call]

    def original_key(self, key: str) -> str:
        """Return the original model's name for what this sequence holds at `key`, such as "3.conv1.weight"."""
        if len(self) != len(self.paths):
            raise RuntimeError(
                f"this LayerSequence was made of {len(self.paths)} layers and now has {len(self)}, so its names no "
                "longer match; make a new LayerSequence instead of adding or removing layers"
            )
        index, _, rest = key.partition(".")
        if not index.isdecimal():
            return key  # not in a layer: a caller attached it to the sequence itself
        return ".".join(filter(None, (self.paths[int(index)], rest)))

    def in_original_order(self, names: Iterable[str]) -> list[str]:
        """Sort names as in the original; names that the original lacks come last, in the given order."""
        return sorted(names, key=lambda name: self._positions.get(name, len(self._positions)))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        members = super().named_parameters("", recurse, remove_duplicate=False)
        return self._renamed(members, prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        members = super().named_buffers("", recurse, remove_duplicate=False)
        return self._renamed(members, prefix, remove_duplicate)

    def _renamed(
        self, members: Iterable[tuple[str, Member]], prefix: str, remove_duplicate: bool
    ) -> Iterator[tuple[str, Member]]:
        # For a tensor with two names the original yields the first in its own order: sort, then drop duplicates.
        by_name = {self.original_key(key): member for key, member in members}
        yielded: set[int] = set()
        for name in self.in_original_order(by_name):
            member = by_name[name]
            if remove_duplicate and id(member) in yielded:
                continue
            yielded.add(id(member))
            yield f"{prefix}.{name}" if prefix else name, member

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> LayerSequence: ...
    def __getitem__(self, index: int | slice) -> nn.Module | LayerSequence:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = LayerSequence(list(self)[index], paths=self.paths[index], names=self.layer_names[index])
        part._positions = self._positions
        return part


def layer_names(module: nn.Sequential) -> tuple[str, ...]:
    """What to call the layers of any nn.Sequential in messages."""
    return module.layer_names if isinstance(module, LayerSequence) else tuple(dict(module.named_children()))


def layer_class(layer: nn.Module) -> str:
    """The name of a layer's class in messages; of a traced layer, the class of the module that it replaces."""
    traced: str = getattr(layer, "traced_class", "")
    return traced or type(layer).__name__


def original_output(module: nn.Sequential, output: Any, training: bool | None = None) -> Any:
    """Build what the original model returns from the last layer's output; `training` is by default the module's mode.

    Pipelines carry tensors and tuples, so the last layer of a model that returns anything else returns its tensors.
    """
    mode = module.training if training is None else training
    template = module.output_templates.get(mode, SINGLE) if isinstance(module, LayerSequence) else SINGLE
    return output if template == SINGLE else unflatten(template, output)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, tied and non-persistent ones included, in the order of a state_dict."""
    for path, part in module.named_modules(remove_duplicate=False):
        yield from chain(
            part.named_parameters(path, recurse=False, remove_duplicate=False),
            part.named_buffers(path, recurse=False, remove_duplicate=False),
        )


def _check_length(argument: str, given: tuple[str, ...], layers: int) -> None:
    if len(given) != layers:
        raise ValueError(f"{len(given)} {argument} for {layers} layers ({argument}: {list(given)})")


def _check_no_collisions(sequence: LayerSequence) -> None:
    """Two layers may hold the same tensor under the same name, but not different tensors."""
    first: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in named_tensors(sequence):
        name = sequence.original_key(key)
        other_key, other = first.setdefault(name, (key, tensor))
        if other is not tensor:
            raise ValueError(f"'{other_key}' and '{key}' are different tensors with the same name '{name}'")


def _check_completeness(sequence: LayerSequence, expected: Mapping[str, int]) -> None:
    names = {sequence.original_key(key): None for key, _ in named_tensors(sequence)}
    missing = [name for name in expected if name not in names]
    extra = [name for name in names if name not in expected]
    if missing or extra:
        raise ValueError(
            f"the layers do not hold the same tensors as the original: missing {missing}, extra {extra}"
        )


# Hooks for state_dict and load_state_dict. torch passes a state_dict down the module tree by the names of children, so
# loading needs two hooks: before it, original names become layer keys; after it, the layer keys that the layers
# reported as missing, unexpected or of the wrong shape become original names again. As hooks, they also work where
# the sequence is part of a larger model.


class _IncompatibleKeys(Protocol):
    missing_keys: list[str]
    unexpected_keys: list[str]


@final
@dataclass(frozen=True)
class _Load:
    """Where the reports of one load begin: torch collects those of all modules in the same three lists."""

    prefix: str
    missing_start: int
    unexpected_start: int
    messages_start: int
    messages: list[str]


def _save_original_names(
    module: LayerSequence, state_dict: dict[str, Any], prefix: str, _metadata: Any
) -> None:
    own_keys = [key for key in state_dict if key.startswith(prefix)]
    renamed = {module.original_key(key.removeprefix(prefix)): state_dict.pop(key) for key in own_keys}
    for name in module.in_original_order(renamed):
        state_dict[prefix + name] = renamed[name]
    repeat_versions(state_dict, prefix, module.original_key)


def _load_original_names(
    sequence: LayerSequence,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    messages: list[str],
) -> None:
    # Remove all keys before adding any: the original name of one tensor may be the layer key of another.
    given = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    layer_keys = _layer_keys(sequence)
    for key, value in given.items():
        name = key.removeprefix(prefix)
        keys = layer_keys.get(name) or _keys_at_owner(sequence, name)
        if not keys:
            unexpected_keys.append(key)
        state_dict.update({prefix + layer_key: value for layer_key in keys})
    sequence.load_in_progress = _Load(
        prefix, len(missing_keys), len(unexpected_keys), len(messages), messages
    )


def _report_original_names(sequence: LayerSequence, incompatible: _IncompatibleKeys) -> None:
    load, sequence.load_in_progress = sequence.load_in_progress, None
    assert load is not None, "the hook before loading has run"

    def original(key: str) -> str:
        return load.prefix + sequence.original_key(key.removeprefix(load.prefix))

    for reported, start in (
        (incompatible.missing_keys, load.missing_start),
        (incompatible.unexpected_keys, load.unexpected_start),
    ):
        # A dict drops duplicates: two layers that hold the same tensor both report it, under the same name.
        reported[start:] = dict.fromkeys(map(original, reported[start:]))
    names = {
        load.prefix + key: load.prefix + name for name, keys in _layer_keys(sequence).items() for key in keys
    }
    load.messages[load.messages_start :] = [
        re.sub(r'[^\s":]+', lambda match: names.get(match[0], match[0]), message)
        for message in load.messages[load.messages_start :]
    ]


def _layer_keys(sequence: LayerSequence) -> dict[str, list[str]]:
    """Map each original name to its layer keys; there are several if layers share a tensor."""
    layer_keys: dict[str, list[str]] = {}
    for index, layer in enumerate(sequence):
        for key in layer.state_dict(keep_vars=True):
            layer_key = f"{index}.{key}"
            layer_keys.setdefault(sequence.original_key(layer_key), []).append(layer_key)
    return layer_keys


def _keys_at_owner(sequence: LayerSequence, name: str) -> list[str]:
    """Return the key at the innermost module that `name` is in.

    That module may accept the name even though it holds no such tensor: some modules of torchvision convert the
    names of their older versions in `_load_from_state_dict`.
    """
    modules = {
        sequence.original_key(path): path
        for path, module in sequence.named_modules(remove_duplicate=False)
        if module is not sequence
    }
    owner = name
    while owner := owner.rpartition(".")[0]:
        if owner in modules:
            return [modules[owner] + name.removeprefix(owner)]
    return []


def layer_paths(module: nn.Sequential) -> tuple[str, ...]:
    """For each layer of any nn.Sequential the path of its content in the original."""
    return module.paths if isinstance(module, LayerSequence) else tuple(dict(module.named_children()))
