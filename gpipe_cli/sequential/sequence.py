"""A sequence of layers that speaks the names of the model it was made from.

A layer is a child called "0", "1", ... as in any nn.Sequential, because a child's name cannot hold a dot and
a cut may go through a nested module. What stands inside a layer keeps its place relative to a *path* of the
original model: the layer at path "layer1.2" holds "conv1.weight" where the original has
"layer1.2.conv1.weight", and a layer at path "" holds pieces of the root under their own names. So the whole
table from layer key to original key is one path per layer.

`state_dict`, `load_state_dict`, `named_parameters` and `named_buffers` speak the original names in the
original order. `named_modules` and `get_submodule` speak of the sequence as it is built, so that they agree.
Inside another module the state_dict still holds the original names; for the rest ask the sequence itself.

Where the original returns a dict, the last layer gives a tuple, because tensors and tuples are what a pipe
carries; `outside` makes it a dict again for whoever called the sequence or the pipe.

This file decides names. It knows nothing of how layers are found or run; how a state_dict is taken in is
told in `loading`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar, final, overload

from torch import Tensor, nn

from gpipe_cli.sequential import loading
from gpipe_cli.torch_internals.state_version import adopt_version, repeat_versions

__all__ = ["Sequence", "layer_names", "outside"]

Member = TypeVar("Member", bound=Tensor)
NO_DICT: Mapping[bool, tuple[str, ...]] = MappingProxyType({})


@final
class Sequence(nn.Sequential):
    """nn.Sequential whose keys are those of the original model.

    layers: the layers in the order they run.
    paths: where the content of each stood in the original; by default its index.
    names: what each is called for people; by default its path, or its index where the path is empty.
    original: read once, for the order of its names and to see that none is lost; by default layer by layer.
    output_names: in training and in evaluation the keys of the dict the original returns, if it does.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        paths: Iterable[str] | None = None,
        names: Iterable[str] | None = None,
        original: nn.Module | None = None,
        output_names: Mapping[bool, tuple[str, ...]] = NO_DICT,
    ) -> None:
        super().__init__(*layers)
        self.output_names = dict(output_names)
        indices = [str(index) for index in range(len(self))]
        self.paths = tuple(indices if paths is None else paths)
        _check_length("paths", self.paths, len(self))
        by_default = (path or index for path, index in zip(self.paths, indices, strict=True))
        self.layer_names = tuple(by_default if names is None else names)
        _check_length("names", self.layer_names, len(self))
        _check_agreement(self)
        self._positions: dict[str, int] = {}
        if original is not None:
            self._positions = {name: position for position, name in enumerate(_member_names(original))}
            _check_completeness(self, self._positions)
            self.training = original.training
            adopt_version(self, original)
        self.register_state_dict_post_hook(_speak_original_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(loading.take_original_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(loading.report_original_names)  # type: ignore[no-untyped-call]
        self.loading: loading.Load | None = None

    def forward(self, input: Any) -> Any:
        return outside(self, super().forward(input))  # type: ignore[no-untyped-call]

    def original_key(self, key: str) -> str:
        """The original model's name for what this sequence holds at `key`, such as "3.conv1.weight"."""
        if len(self) != len(self.paths):
            raise RuntimeError(
                f"a Sequence of {len(self.paths)} layers now has {len(self)}: its names no longer fit; "
                "make a new Sequence instead of adding or removing layers"
            )
        index, _, rest = key.partition(".")
        if not index.isdecimal():
            return key  # not in a layer: somebody hung it on the sequence itself
        return ".".join(filter(None, (self.paths[int(index)], rest)))

    def in_original_order(self, names: Iterable[str]) -> list[str]:
        """Sorted as in the original; names it did not have come last, in the order given."""
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
        # Of a tensor with two names the original gives the first in its own order: sort, then drop.
        by_name = {self.original_key(key): member for key, member in members}
        seen: set[int] = set()
        for name in self.in_original_order(by_name):
            member = by_name[name]
            if remove_duplicate and id(member) in seen:
                continue
            seen.add(id(member))
            yield f"{prefix}.{name}" if prefix else name, member

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence: ...
    def __getitem__(self, index: int | slice) -> nn.Module | Sequence:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        part = Sequence(list(self)[index], paths=self.paths[index], names=self.layer_names[index])
        part._positions = self._positions
        return part


def _speak_original_names(module: Sequence, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    ours = [key for key in state_dict if key.startswith(prefix)]
    renamed = {module.original_key(key.removeprefix(prefix)): state_dict.pop(key) for key in ours}
    for name in module.in_original_order(renamed):
        state_dict[prefix + name] = renamed[name]
    repeat_versions(state_dict, prefix, module.original_key)


def _members(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, tied and non-persistent ones included, in the order of a state_dict."""
    for path, part in module.named_modules(remove_duplicate=False):
        yield from chain(
            part.named_parameters(path, recurse=False, remove_duplicate=False),
            part.named_buffers(path, recurse=False, remove_duplicate=False),
        )


def _member_names(module: nn.Module) -> list[str]:
    return [name for name, _ in _members(module)]


def _check_length(what: str, given: tuple[str, ...], layers: int) -> None:
    if len(given) != layers:
        raise ValueError(f"{len(given)} {what} for {layers} layers ({what}: {list(given)})")


def _check_agreement(sequence: Sequence) -> None:
    """Two layers may hold one tensor under one name; two tensors under one name would lose one of them."""
    first: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in _members(sequence):
        name = sequence.original_key(key)
        other_key, other = first.setdefault(name, (key, tensor))
        if other is not tensor:
            raise ValueError(f"'{other_key}' and '{key}' are different tensors, and both are called '{name}'")


def _check_completeness(sequence: Sequence, expected: Iterable[str]) -> None:
    names = {sequence.original_key(key): None for key in _member_names(sequence)}
    lost = [name for name in expected if name not in names]
    new = [name for name in names if name not in set(expected)]
    if lost or new:
        raise ValueError(f"the layers do not hold what the original holds: lost {lost}, new {new}")


def layer_names(module: nn.Sequential) -> tuple[str, ...]:
    """What to call the layers of any sequence: its children's names, unless it knows better ones."""
    return module.layer_names if isinstance(module, Sequence) else tuple(dict(module.named_children()))


def outside(module: nn.Sequential, output: Any) -> Any:
    """What the last layer of any sequence gave, as the original model gives it: by name where it returns a dict."""
    names = module.output_names.get(module.training) if isinstance(module, Sequence) else None
    return output if names is None else dict(zip(names, output, strict=True))
