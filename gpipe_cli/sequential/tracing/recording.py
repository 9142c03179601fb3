"""What one run of a model did: the modules it called, and the torch functions it called between them.

Tensors appear as references, so that recordings of different runs can be compared call by call.
"""

from __future__ import annotations

import dataclasses
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from gpipe_cli.pytree import Template
from gpipe_cli.torch_internals import modules
from gpipe_cli.torch_internals.tensors import storage_of, version_of

_WITHOUT_TENSORS = frozenset({bool, float, int, str, type(None), torch.Size, torch.device, torch.dtype})
"""Most arguments are of these types, so they are looked at first."""


@final
class FieldName(str):
    """The name of a field of a dataclass, as opposed to a key of a dict."""


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace every leaf; a torch.Size becomes a tuple, and a dict of any kind a plain one."""
    if isinstance(tree, tuple):
        members = [map_tree(function, member) for member in tree]
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    if isinstance(tree, list):
        return [map_tree(function, member) for member in tree]
    if isinstance(tree, dict):
        return {key: map_tree(function, member) for key, member in tree.items()}
    if isinstance(tree, slice):
        return slice(*(map_tree(function, bound) for bound in (tree.start, tree.stop, tree.step)))
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_tree(leaves.append, tree)
    return leaves


def structure_of(tree: Any) -> Any:
    """The containers with None in place of every leaf, to compare."""
    return map_tree(lambda _: None, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    return [tensor for _, tensor in located_tensors(tree)]


def located_tensors(tree: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Each tensor and where it is: keys of containers, and names of a dataclass's fields."""
    located: list[tuple[tuple[Any, ...], Tensor]] = []
    _collect(tree, (), located)
    return located


def _collect(tree: Any, access: tuple[Any, ...], located: list[tuple[tuple[Any, ...], Tensor]]) -> None:
    if type(tree) in _WITHOUT_TENSORS:
        return
    if isinstance(tree, Tensor):
        located.append((access, tree))
    elif isinstance(tree, tuple | list):
        for index, member in enumerate(tree):
            _collect(member, (*access, index), located)
    elif isinstance(tree, dict):
        for key, member in tree.items():
            _collect(member, (*access, key), located)
    elif isinstance(tree, slice):
        _collect((tree.start, tree.stop, tree.step), access, located)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _collect(getattr(tree, field.name), (*access, FieldName(field.name)), located)


Target: TypeAlias = str | Callable[..., Any]
"""The path of a module, or a torch function."""

_NAMES = """
    alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout gumbel_softmax
    multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm rrelu
"""
_RANDOM = frozenset(_NAMES.split())

_METADATA = """
    __hash__ __len__ __repr__ data_ptr dim element_size get_device is_complex is_conj is_contiguous is_floating_point
    is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_tensor ndimension nelement numel size
    storage_offset stride
"""
_READS_NO_VALUES = frozenset(_METADATA.split())
"""Functions of tensors that return numbers and lists but depend on shapes and types only."""

LEAVES_TORCH = frozenset({"numpy", "__array__", "__dlpack__"})
"""Functions of tensors whose results are computed with outside torch, where nothing is recorded."""


SIZED_BY_VALUES = {
    getattr(namespace, name)
    for namespace in (torch, torch.Tensor)
    for name in ("argwhere", "masked_select", "nonzero", "unique", "unique_consecutive")
}
"""Functions whose results have as many rows as the values of their input say."""

_NOT_OF_THE_MODEL = tuple(str(Path(file).parent) for file in (torch.__file__, __file__, modules.__file__))


@final
@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the model's own code."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number} `{linecache.getline(self.file, self.number).strip()}`"

    @staticmethod
    def running() -> SourceLine:
        """The innermost line that runs now and is neither torch's nor the tracer's."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_THE_MODEL):
            frame = frame.f_back
        return SourceLine(frame.f_code.co_filename, frame.f_lineno)

    @staticmethod
    def raising(error: BaseException) -> SourceLine | None:
        """The innermost such line that an error comes from."""
        frames = walk_tb(error.__traceback__)
        lines = [SourceLine(frame.f_code.co_filename, number) for frame, number in frames]
        return next((line for line in reversed(lines) if not line.file.startswith(_NOT_OF_THE_MODEL)), None)

    @staticmethod
    def defining(method: Callable[..., Any]) -> SourceLine | None:
        code = getattr(unwrap(method), "__code__", None)
        return None if code is None else SourceLine(code.co_filename, code.co_firstlineno)


@final
class NotRecordable(Exception):
    """The module at `path` does something that its recorded calls would not repeat."""

    def __init__(self, path: str, line: SourceLine | None, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.line = line
        self.reason = reason


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """The tensor of this number: those of the sample come first, then those that calls return, in order."""

    number: int


@final
@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer of the model."""

    path: str


@final
@dataclass(frozen=True, slots=True)
class Device:
    """A device. Layers may move to any device, so they use that of their own input."""


@final
@dataclass(frozen=True, slots=True)
class ReadDtype:
    """A dtype, and the tensor whose dtype the forward has read last with this result."""

    dtype: torch.dtype
    source: Ref | Attribute | None


@final
@dataclass(frozen=True, slots=True, eq=False)
class ConstantTensor:
    """A tensor that no recorded call has made, such as a plain attribute."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConstantTensor) or self.tensor.is_meta or other.tensor.is_meta:
            return isinstance(other, ConstantTensor) and self.tensor is other.tensor
        if self.tensor is other.tensor:  # which may hold NaN
            return True
        return self.tensor.dtype == other.tensor.dtype and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


@final
@dataclass(frozen=True, slots=True)
class Value:
    """What is known about a tensor."""

    shape: tuple[int, ...]
    bytes: int
    requires_grad: bool
    depends_on: frozenset[str]
    """The inputs it was computed from, by name; also "parameters" and "random"."""
    access: tuple[Any, ...] = ()
    """Where it is in what its call returned: keys of containers and names of attributes."""


@final
@dataclass(slots=True)
class Call:
    target: Target
    arguments: Any
    """(args, kwargs) with the objects above in place of what they stand for."""
    modules: tuple[str, ...]
    """Paths of the modules whose forward is running, the outermost first."""
    line: SourceLine
    grad: bool
    """Whether gradients are enabled."""
    first: int
    """The number of the first tensor that it returns."""
    values: list[Value] = field(default_factory=list)
    """Those of the tensors that it returns."""
    writes: bool = False
    """Whether it writes memory in place."""
    reads_values: bool = False
    """Whether it turns values of tensors into Python objects, as `Tensor.__bool__` does."""
    result: Any = None
    """What a call that reads values returned."""

    @property
    def is_impure(self) -> bool:
        return self.writes or isinstance(self.target, str) or self.is_random

    @property
    def is_random(self) -> bool:
        return not isinstance(self.target, str) and self.target.__name__ in _RANDOM


@final
@dataclass(frozen=True, slots=True)
class WriteSpan:
    """The first and last of the calls that use the same memory, which one of them writes in place.

    A cut between the two would separate the memory from its writer, since layers exchange detached tensors. The number
    -1 stands for the inputs.
    """

    first: int
    last: int


@final
@dataclass(frozen=True, slots=True)
class Recording:
    values: list[Value]
    """Of all tensors, by number."""
    calls: list[Call]
    output: list[Ref | Attribute | ConstantTensor]
    """The tensors that the model returned."""
    template: Template
    """Builds what the model returned from them."""
    spans: list[WriteSpan]


INPUTS = -1
"""The number that stands for a call that made the inputs."""


@final
class MemoryAccesses:
    """Storages are told apart by address, so the caller keeps every tensor alive."""

    def __init__(self) -> None:
        self._copied: dict[int, int] = {}
        self._created: dict[int, int] = {}
        self._used: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}

    def copy(self, copied: Tensor, original: Tensor) -> None:
        """Let `copied` count as the memory of `original`."""
        self._copied[storage_of(copied)] = self._storage(original)

    def record(
        self, call: int, inputs: Iterable[Tensor], written: Iterable[Tensor], outputs: Iterable[Tensor]
    ) -> None:
        for storage in map(self._storage, inputs):
            self._used.setdefault(storage, []).append(call)
        for storage in map(self._storage, written):
            self._written[storage] = call
        for storage in map(self._storage, outputs):
            if storage not in self._used:  # otherwise a view of an input, or the model's own memory
                self._created.setdefault(storage, call)

    def write_spans(self) -> Iterator[WriteSpan]:
        for storage, writer in self._written.items():
            users = self._used[storage]
            if storage in self._created:
                yield WriteSpan(self._created[storage], writer)
            else:
                # The model's own memory: each reader must stay before or after the write, as it was.
                yield WriteSpan(users[0], users[-1])

    def _storage(self, tensor: Tensor) -> int:
        storage = storage_of(tensor)
        return self._copied.get(storage, storage)


@final
class Versions:
    """The tensors in some arguments, and which of them have been written in place since.

    autograd counts a tensor's in-place writes in its version, also on the meta device.
    """

    def __init__(self, arguments: Any) -> None:
        self.tensors = tensors_in(arguments)
        self._versions = [version_of(tensor) for tensor in self.tensors]

    def changed(self) -> list[int]:
        pairs = zip(self.tensors, self._versions, strict=True)
        return [index for index, (tensor, version) in enumerate(pairs) if version_of(tensor) != version]

    def written(self) -> list[Tensor]:
        return [self.tensors[index] for index in self.changed()]


def attribute_of(func: Callable[..., Any]) -> str | None:
    """The name of the tensor attribute that a function reads, such as "shape"; None for other functions."""
    descriptor = getattr(func, "__self__", None)
    return descriptor.__name__ if func.__name__ == "__get__" and descriptor is not None else None


def reads_values(func: Callable[..., Any], output: Any) -> bool:
    return isinstance(output, bool | int | float | complex | list) and func.__name__ not in _READS_NO_VALUES


def is_mask(index: Any) -> bool:
    tensors = tensors_in(index)
    return any(tensor.dtype == torch.bool for tensor in tensors) and not any(
        tensor.is_meta for tensor in tensors
    )
