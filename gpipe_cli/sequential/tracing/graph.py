"""A program as a torch.fx graph, the form in which it is cut into layers and compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx

from gpipe_cli.pytree import Template
from gpipe_cli.sequential.tracing.generalize import ByMode, DtypeOf, Program, SizeExpression
from gpipe_cli.sequential.tracing.recording import (
    Attribute,
    Call,
    ConstantTensor,
    Device,
    FieldName,
    Ref,
    WriteSpan,
    leaves_of,
    map_tree,
)
from gpipe_cli.sequential.tracing.sample import Sample, Size

_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: operator.getitem,
    torch.Tensor.__setitem__: operator.setitem,
}

_METHODS: dict[Callable[..., Any], str] = {
    member: name
    for kind in reversed(torch.Tensor.__mro__)
    for name, member in vars(kind).items()
    if callable(member)
}
"""Not by `__name__`: that of some functions of torch.Tensor is the name of what they wrap."""

_WRITTEN = {
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    *map(type, (None, ..., torch.float, torch.strided, torch.preserve_format)),
}
"""Types of arguments that generated code can write down. Any other object is an attribute of its layer."""


@final
@dataclass(frozen=True, slots=True)
class ValueInfo:
    """What is known about the value of a node."""

    kind: type
    bytes: int = 0
    requires_grad: bool = False
    dimensions: Mapping[Size, int] | None = None
    """For a tensor, the dimensions that are equal to a size of the input."""
    size: Size | None = None
    """For a number, the size of the input that it is."""

    @property
    def is_tensor(self) -> bool:
        return issubclass(self.kind, Tensor)


@final
@dataclass(frozen=True)
class GraphInfo:
    graph: fx.Graph
    values: dict[fx.Node, ValueInfo]
    calls: dict[fx.Node, int]
    """The number of the call that each step belongs to."""
    owners: dict[fx.Node, str]
    """The module in whose forward each step is."""
    spans: list[WriteSpan]
    template: Template
    """Builds the model's output from the tensors that the graph returns."""
    constants: dict[str, Any]
    """What the graph reads as attributes although the model has none of that name: tensors and other objects."""


def build_graph(program: Program, sample: Sample, prefix: str) -> GraphInfo:
    """Return the graph of a program; `prefix` begins the names of its constants."""
    builder = _Builder(program, sample, prefix)
    for number in _needed_calls(program, sample):
        builder.add_call(number)
    builder.add_output()
    recording = program.recording
    owners = {node: recording.calls[max(0, number)].modules[-1] for node, number in builder.calls.items()}
    return GraphInfo(
        builder.graph,
        builder.values,
        builder.calls,
        owners,
        recording.spans,
        recording.template,
        builder.constants,
    )


def _needed_calls(program: Program, sample: Sample) -> list[int]:
    """The calls that the output depends on, and those that do more than return something."""
    needed = {leaf.number for leaf in program.output if isinstance(leaf, Ref)}
    numbers = []
    for number, call in reversed([*enumerate(program.recording.calls)]):
        returned = range(call.first, call.first + len(call.values))
        is_needed = call.is_impure or (call.reads_values and is_guarded(program, call, sample))
        if is_needed or not needed.isdisjoint(returned):
            numbers.append(number)
            for leaf in leaves_of(program.arguments[number]):
                if isinstance(leaf, Ref):
                    needed.add(leaf.number)
                elif isinstance(leaf, DtypeOf) and isinstance(leaf.source, Ref):
                    needed.add(leaf.source.number)
    return numbers[::-1]


def is_guarded(program: Program, call: Call, sample: Sample) -> bool:
    """Whether a decision on values must be checked at run time.

    Not if the values come from sizes alone. Nor if masks alone decide whether to do something: the trace has seen
    padding, and a model that skips its mask where there is none computes the same with it.
    """
    values = program.recording.values
    sources = {
        name
        for leaf in leaves_of(call.arguments)
        if isinstance(leaf, Ref)
        for name in values[leaf.number].depends_on
    }
    sources |= {"parameters" for leaf in leaves_of(call.arguments) if isinstance(leaf, Attribute)}
    return not sources <= (sample.masks if isinstance(call.result, bool) else set())


@final
class _Builder:
    def __init__(self, program: Program, sample: Sample, prefix: str) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, ValueInfo] = {}
        self.calls: dict[fx.Node, int] = {}
        self.constants: dict[str, Any] = {}
        self._program = program
        self._prefix = prefix
        self._nodes: dict[int, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._sizes: dict[Size, fx.Node] = {}
        self._number = -1
        for number, name in enumerate(sample.names):
            self._add_value(number, self.graph.placeholder(_identifier(name)))
        for size in program.sizes:
            tensor, dimension = size.places[0]
            node = self.graph.call_method("size", (self._nodes[tensor], dimension))
            self.values[node] = ValueInfo(int, size=size)
            self.calls[node] = self._number
            self._sizes[size] = node

    def add_call(self, number: int) -> None:
        self._number = number
        call = self._program.recording.calls[number]
        args, kwargs = map_tree(lambda leaf: self._argument(leaf, call), self._program.arguments[number])
        if isinstance(call.target, str):
            node = self.graph.call_module(call.target, args, kwargs)
        else:
            node = self._call_function(call.target, args, kwargs)
        self.calls[node] = number
        self.values[node] = ValueInfo(type(call.result))
        if call.reads_values:
            message = f"{call.line} went on with {call.result!r} when the model was traced"
            expected = map_tree(lambda leaf: self._argument(leaf, call), self._program.results[number])
            self._function(check_decision, (node, expected, message, call.modules[-1]), type(None))
        for offset, value in enumerate(call.values):
            member = node
            for key in value.access:
                read = getattr if isinstance(key, FieldName) else operator.getitem
                member = self._function(
                    read, (member, str(key) if isinstance(key, FieldName) else key), type(None)
                )
            if not call.grad:
                member = self._function(torch.detach, (member,), Tensor)
            self._add_value(call.first + offset, member)

    def _call_function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        if target in _OPERATORS:
            return self.graph.call_function(_OPERATORS[target], args, kwargs)
        if target in _METHODS:
            return self.graph.call_method(_METHODS[target], args, kwargs)
        return self.graph.call_function(target, args, kwargs)

    def add_output(self) -> None:
        self.graph.output(tuple(self._argument(leaf, None) for leaf in self._program.output))

    def _add_value(self, number: int, node: fx.Node) -> None:
        value = self._program.recording.values[number]
        dimensions = self._program.dimensions[number]
        self._nodes[number] = node
        self.values[node] = ValueInfo(Tensor, value.bytes, value.requires_grad, dimensions)

    def _argument(self, leaf: Any, call: Call | None) -> Any:
        if isinstance(leaf, Ref):
            return self._nodes[leaf.number]
        if isinstance(leaf, Attribute):
            return self._attribute(leaf.path)
        if isinstance(leaf, Device):
            return self._function(current_device, (), torch.device)
        if isinstance(leaf, DtypeOf):
            return self._function(getattr, (self._argument(leaf.source, call), "dtype"), torch.dtype)
        if isinstance(leaf, SizeExpression):
            return self._size(leaf)
        if isinstance(leaf, ByMode):
            return self._by_mode(leaf, call)
        if type(leaf) in _WRITTEN:
            return leaf
        name = f"{self._prefix}{len(self.constants)}"
        self.constants[name] = leaf.tensor if isinstance(leaf, ConstantTensor) else leaf
        return self._attribute(name)

    def _attribute(self, path: str) -> fx.Node:
        if path not in self._attributes:
            self._attributes[path] = self.graph.get_attr(path)
        return self._attributes[path]

    def _size(self, expression: SizeExpression) -> Any:
        total: Any = None
        for factors, coefficient in expression.terms:
            term: Any = coefficient
            for size in factors:
                node = self._sizes[size]
                term = (
                    node
                    if term == 1 and term is not True
                    else self._function(operator.mul, (term, node), int)
                )
            total = term if total is None else self._function(operator.add, (total, term), int)
        return 0 if total is None else total

    def _by_mode(self, leaf: ByMode, call: Call | None) -> Any:
        """Read `training` of the module in whose forward the call is, when the layer runs."""
        owner = "" if call is None else call.modules[-1]
        training = self._attribute(f"{owner}.training" if owner else "training")
        if leaf.training is True and leaf.evaluation is False:
            return training
        choices = (self._argument(choice, call) for choice in (leaf.training, leaf.evaluation))
        return self._function(choose, (training, *choices), type(None))

    def _function(self, target: Callable[..., Any], args: tuple[Any, ...], kind: type) -> fx.Node:
        node = self.graph.call_function(target, args)
        self.values[node] = ValueInfo(kind)
        self.calls[node] = self._number
        return node


def _identifier(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name).strip("_") or "input"


# Functions that generated code calls.


@final
class DecisionChanged(RuntimeError):
    """The model would decide otherwise on the values of this batch than it did when it was traced."""


def current_device() -> torch.device:
    raise AssertionError("layers replace this by the device of their input")


def choose(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    return in_training if training else in_evaluation


def check_decision(result: Any, traced: Any, message: str, path: str) -> None:
    if result != traced:
        cure = (
            f"keep '{path}' whole with model.leaves=[{path}]" if path else "move that code into a submodule"
        )
        raise DecisionChanged(
            f"{message}, and now it is {result!r}; {cure}, or trace the model with a sample for which it decides "
            "as for your data"
        )
