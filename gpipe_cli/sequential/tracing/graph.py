"""What a run of a model did, as a torch.fx graph: the modules it called, and the torch functions between them.

The same form serves one recorded run, several that were generalized, and the graph that is cut into layers. In the
first two, arguments may hold objects that stand for what a layer finds out when it runs, such as its device.
"""

from __future__ import annotations

import dataclasses
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from traceback import walk_tb
from types import NoneType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from gpipe_cli.pytree import Template
from gpipe_cli.sequential.tracing.sample import Size
from gpipe_cli.torch_internals import modules

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
    map_aggregate(tree, leaves.append)
    return leaves


def structure_of(tree: Any) -> Any:
    """The containers with None in place of every leaf, to compare."""
    return map_aggregate(tree, lambda _: None)


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


Place: TypeAlias = int | str
"""Tells tensors of a run apart: the inputs and what calls return by number, parameters and buffers by path."""


@final
@dataclass(frozen=True, slots=True)
class Device:
    """A device. Layers may move to any device, so they use that of their own input."""


@final
@dataclass(frozen=True, slots=True)
class ReadDtype:
    """A dtype, and the tensor whose dtype the forward has read last with this result."""

    dtype: torch.dtype
    source: Place | None


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


INPUTS = -1
"""The number that stands for a call that made the inputs."""


@final
@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What is known of a node: the call that it belongs to, and the value that it has."""

    call: int = INPUTS
    modules: tuple[str, ...] = ("",)
    """Paths of the modules whose forward is running, the outermost first."""
    line: SourceLine | None = None
    grad: bool = True
    """Whether gradients are enabled."""
    writes: bool = False
    """Whether it writes memory in place."""
    is_impure: bool = False
    """Whether it does more than return something: it writes, draws random numbers or calls a module."""
    decides: bool = False
    """Whether it turns values of tensors into Python objects, as `Tensor.__bool__` does."""
    result: Any = None
    """What a call that decides returned."""
    expected: Any = None
    """`result` with expressions, where several runs were generalized."""
    kind: type = NoneType
    place: Place | None = None
    """What tells a tensor apart from others; the fields below are about tensors too, except for `size`."""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    requires_grad: bool = False
    depends_on: frozenset[str] = frozenset()
    """The inputs it was computed from, by name; also "parameters" and "random"."""
    dimensions: Mapping[Size, int] = field(default_factory=dict)
    """The dimensions that are equal to a size of the inputs, whatever that is."""
    size: Size | None = None
    """For a number, the size of the inputs that it is."""

    @property
    def is_tensor(self) -> bool:
        return issubclass(self.kind, Tensor)


def info_of(node: fx.Node) -> NodeInfo:
    info = node.meta["trace"]
    assert isinstance(info, NodeInfo)
    return info


def add_node(
    graph: fx.Graph,
    op: str,
    target: str | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    info: NodeInfo,
) -> fx.Node:
    # Arguments are set afterwards: create_node would walk over them in Python, to warn of numbers that we never have.
    node = graph.create_node(op, target)
    node.args, node.kwargs = args, kwargs
    node.meta["trace"] = info
    return node


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
@dataclass(frozen=True, eq=False)
class TraceGraph:
    graph: fx.Graph
    template: Template
    """Builds what the model returned from the tensors that the graph returns."""
    spans: list[WriteSpan]
    sizes: tuple[Size, ...] = ()
    """The sizes that vary."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What the graph reads as attributes although the model has none of that name: tensors and other objects."""

    @property
    def steps(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> fx.Node:
        node: fx.Node = next(iter(self.graph.find_nodes(op="output")))
        return node

    @property
    def tensors(self) -> list[fx.Node]:
        """The inputs, and what calls return."""
        return [node for node in (*self.inputs, *self.steps) if info_of(node).is_tensor]


# Functions that generated code calls.


@final
class DecisionChanged(RuntimeError):
    """The model would decide otherwise on the values of this batch than it did when it was traced."""


def device_of_input() -> torch.device:
    raise AssertionError("layers replace this by the device of their input")


def choose(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    return in_training if training else in_evaluation


def check_decision(
    call: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    traced: Any,
    message: str,
    path: str,
) -> None:
    """call: the method of the first argument, or the function, that turns values into Python objects."""
    if any(isinstance(each, Tensor) and each.is_meta for each in args):
        return  # There are no values.
    result = getattr(args[0], call)(*args[1:], **kwargs) if isinstance(call, str) else call(*args, **kwargs)
    if result != traced:
        hint = (
            f"keep '{path}' whole with 'model.leaves=[{path}]'" if path else "move that code into a submodule"
        )
        raise DecisionChanged(
            f"{message}, and now it is {result!r}; {hint}, or trace the model with a sample for which it decides "
            "as for your data"
        )
