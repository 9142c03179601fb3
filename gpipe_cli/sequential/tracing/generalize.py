"""From runs of a model at several sizes, in both modes and in two dtypes to one graph for all of them.

The runs must agree call by call. Where an argument differs between them, it becomes an expression: a whole number that
depends on the sizes of the inputs, a value for each mode, or the dtype of a tensor. The graph that is cut into layers
computes these expressions, and has only the calls that matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias, final

import torch
from torch import fx
from torch.fx.node import map_aggregate

from gpipe_cli.sequential.tracing.graph import (
    ConstantTensor,
    Device,
    NodeInfo,
    NotRecordable,
    Place,
    ReadDtype,
    TraceGraph,
    add_node,
    check_decision,
    choose,
    device_of_input,
    info_of,
    leaves_of,
    structure_of,
)
from gpipe_cli.sequential.tracing.sample import Size, TraceSample

Terms: TypeAlias = tuple[tuple[tuple[Size, ...], int], ...]
"""Products of sizes with their factors; the empty product is 1."""


@final
@dataclass(frozen=True)
class Setting:
    """How a run was made."""

    training: bool
    sizes: Mapping[Size, int]
    other_dtype: bool = False


@final
@dataclass(frozen=True, slots=True)
class SizeExpression:
    """A sum of products of sizes, such as 4 * batch * length + 1."""

    terms: Terms
    kind: type[int] | type[float] = int

    def at(self, sizes: Mapping[Size, int]) -> int | float:
        total = 0
        for factors, coefficient in self.terms:
            for size in factors:
                coefficient *= sizes[size]
            total += coefficient
        return self.kind(total)


@final
@dataclass(frozen=True, slots=True)
class ByMode:
    training: Any
    evaluation: Any


@final
@dataclass(frozen=True, slots=True)
class DtypeOf:
    source: Place


def used_sizes(trace: TraceGraph) -> set[Size]:
    """The sizes that arguments are computed from."""
    return {size for node in trace.graph.nodes for leaf in _leaves(node) for size in _sizes_of(leaf)}


def _sizes_of(leaf: Any) -> set[Size]:
    if isinstance(leaf, ByMode):
        return _sizes_of(leaf.training) | _sizes_of(leaf.evaluation)
    return (
        {size for factors, _ in leaf.terms for size in factors} if isinstance(leaf, SizeExpression) else set()
    )


def _leaves(node: fx.Node) -> list[Any]:
    return leaves_of((node.args, node.kwargs))


def generalize(runs: Sequence[tuple[Setting, TraceGraph]], sizes: Sequence[Size]) -> TraceGraph:
    """Return a trace for settings that vary these sizes; raise NotRecordable with the first call that has none."""
    settings = [setting for setting, _ in runs]
    first, *others = (trace for _, trace in runs)
    for other in others:
        _check_alignment(first, other)
    graph = fx.Graph()
    graph.output(graph.graph_copy(first.graph, {}))
    trace = TraceGraph(graph, first.template, first.spans, tuple(sizes))
    merger = _Merger(settings, sizes)
    for node, *nodes in zip(*(each.steps for each in (trace, *others)), strict=True):
        info = info_of(node)
        node.args, node.kwargs = merger.merge(info, [(each.args, each.kwargs) for each in (node, *nodes)])
        if info.decides:
            results = [info_of(each).result for each in (node, *nodes)]
            node.meta["trace"] = replace(info, expected=merger.merge(info, results))
    trace.output.args = merger.merge(NodeInfo(), [each.output.args for each in (trace, *others)])
    for node, *nodes in zip(*(each.tensors for each in (trace, *others)), strict=True):
        shapes = [info_of(each).shape for each in (node, *nodes)]
        node.meta["trace"] = replace(info_of(node), dimensions=_size_dimensions(settings, shapes, sizes))
    return trace


def check(trace: TraceGraph, setting: Setting, run: TraceGraph) -> None:
    """Raise NotRecordable unless the trace does what a run at other sizes did.

    Dimensions that are not equal to a size after all are removed from the trace.
    """
    _check_alignment(trace, run)
    for node, other in zip(trace.steps, run.steps, strict=True):
        info = info_of(other)
        _check_leaves(_leaves(node), _leaves(other), setting, info)
        _check_leaves(leaves_of(info_of(node).expected), leaves_of(info.result), setting, info)
    _check_leaves(_leaves(trace.output), _leaves(run.output), setting, NodeInfo())
    for node, other in zip(trace.tensors, run.tensors, strict=True):
        info, shape = info_of(node), info_of(other).shape
        # Equal only at some sizes, as in `ids[:, :512]`.
        kept = {size: at for size, at in info.dimensions.items() if shape[at] == setting.sizes[size]}
        node.meta["trace"] = replace(info, dimensions=kept)


def check_modules(trace: TraceGraph, _setting: Setting, run: TraceGraph) -> None:
    """Raise NotRecordable unless the trace calls the modules that a run at other sizes called."""
    expected, actual = (
        [node.target for node in each.steps if node.op == "call_module"] for each in (trace, run)
    )
    if expected != actual or trace.template != run.template:
        raise NotRecordable("", None, "it calls other modules at other sizes")


def _check_leaves(expected: Sequence[Any], actual: Sequence[Any], setting: Setting, info: NodeInfo) -> None:
    for expression, leaf in zip(expected, actual, strict=True):
        if isinstance(expression, ByMode):
            expression = expression.training if setting.training else expression.evaluation
        if isinstance(expression, SizeExpression):
            expression = expression.at(setting.sizes)
        if isinstance(expression, DtypeOf) or isinstance(leaf, ReadDtype):
            continue
        if not _same(expression, leaf):
            raise _differs(
                info, f"an argument that it computes was {leaf!r} at other sizes, not {expression!r}"
            )


def _check_alignment(one: TraceGraph, other: TraceGraph) -> None:
    """Raise NotRecordable, with the innermost module that made the difference, unless both make the same calls."""
    left_steps, right_steps = one.steps, other.steps
    for left, right in zip(left_steps, right_steps, strict=False):
        if _description(left) != _description(right):
            raise _diverged(left, right)
    if len(left_steps) != len(right_steps) or one.template != other.template:
        reason = "it returns something else, or calls more functions, at other sizes or in other calls"
        raise NotRecordable("", None, reason)


def _description(node: fx.Node) -> tuple[Any, ...]:
    """What of a call must be the same in every run."""
    info = info_of(node)
    arguments = structure_of((node.args, node.kwargs))
    return (
        node.target,
        info.is_tensor,
        info.modules,
        info.grad,
        info.writes,
        arguments,
        structure_of(info.result),
    )


def _diverged(left: fx.Node, right: fx.Node) -> NotRecordable:
    info, modules = info_of(left), info_of(right).modules
    common = [path for path, other in zip(info.modules, modules, strict=False) if path == other]
    reason = f"it does not do the same at every size, or in every call ({_name(left)} became {_name(right)})"
    return NotRecordable(common[-1], info.line, reason)


def _differs(info: NodeInfo, reason: str) -> NotRecordable:
    return NotRecordable(info.modules[-1], info.line, reason)


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"'{node.target}'"
    return node.target if isinstance(node.target, str) else node.target.__name__


@final
class _Merger:
    """Turns what an argument was in each run into one expression."""

    def __init__(self, settings: Sequence[Setting], sizes: Sequence[Size]) -> None:
        self._settings = settings
        self._sizes = list(sizes)
        self._modes = [
            [index for index, setting in enumerate(settings) if setting.training is training]
            for training in (True, False)
        ]

    def merge(self, info: NodeInfo, trees: Sequence[Any]) -> Any:
        columns = iter(zip(*map(leaves_of, trees), strict=True))

        def merged(_: Any) -> Any:
            leaves = next(columns)
            try:
                return self._merge_leaf(leaves)
            except ValueError as error:
                raise _differs(info, str(error)) from error

        return map_aggregate(trees[0], merged)

    def _merge_leaf(self, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if all(_same(first, leaf) for leaf in leaves):
            return first.dtype if isinstance(first, ReadDtype) else first
        by_mode = [
            self._merge_in_mode({index: leaves[index] for index in indices})
            for indices in self._modes
            if indices
        ]
        # Only training is recorded in another dtype.
        if len(by_mode) == 1 or _same(by_mode[0], by_mode[1]) or isinstance(by_mode[0], DtypeOf):
            return by_mode[0]
        if any(isinstance(leaf, fx.Node) for leaf in by_mode):
            raise ValueError("it uses other tensors in training than in evaluation")
        return ByMode(*by_mode)

    def _merge_in_mode(self, leaves: Mapping[int, Any]) -> Any:
        values = list(leaves.values())
        if all(_same(values[0], leaf) for leaf in values):
            return values[0].dtype if isinstance(values[0], ReadDtype) else values[0]
        if all(isinstance(leaf, ReadDtype) for leaf in values) and values[0].source is not None:
            return DtypeOf(values[0].source)
        if all(isinstance(leaf, int) and not isinstance(leaf, bool) for leaf in values):
            return self._fit(leaves)
        if all(
            isinstance(leaf, float) and leaf.is_integer() for leaf in values
        ):  # such as a number of tokens
            return replace(self._fit({index: int(leaf) for index, leaf in leaves.items()}), kind=float)
        other = next(leaf for leaf in values if not _same(values[0], leaf))
        raise ValueError(f"an argument that it passes was {values[0]!r} in one call and {other!r} in another")

    def _fit(self, leaves: Mapping[int, int]) -> SizeExpression:
        corners = {
            tuple(self._settings[index].sizes[size] for size in self._sizes): leaf
            for index, leaf in leaves.items()
            if not self._settings[index].other_dtype
        }
        terms = _fit_product(corners, self._sizes)
        expression = SizeExpression(tuple((factors, factor) for factors, factor in terms.items() if factor))
        for index, leaf in leaves.items():
            if expression.at(self._settings[index].sizes) != leaf:
                raise ValueError(f"{leaf} does not depend on the sizes of the input as a sum of products")
        return expression


def _fit_product(
    corners: Mapping[tuple[int, ...], int], sizes: Sequence[Size]
) -> dict[tuple[Size, ...], int]:
    """Fit a sum of products to its values at all combinations of two numbers per size."""
    if not sizes:
        return {(): corners[()]}
    low, high = sorted({corner[0] for corner in corners})[:2]
    at_low, at_high = (
        _fit_product(
            {corner[1:]: value for corner, value in corners.items() if corner[0] == number}, sizes[1:]
        )
        for number in (low, high)
    )
    terms: dict[tuple[Size, ...], int] = {}
    for factors in {**at_low, **at_high}:
        difference = at_high.get(factors, 0) - at_low.get(factors, 0)
        slope, rest = divmod(difference, high - low)
        if rest:
            raise ValueError("a number does not depend on the sizes of the input as a sum of products")
        terms[(sizes[0], *factors)] = slope
        terms[factors] = at_low.get(factors, 0) - slope * low
    return terms


def _same(left: Any, right: Any) -> bool:
    """Whether a function could not tell two arguments apart: 0, 0.0, -0.0 and False are four different ones."""
    if left is right:
        return True
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        return info_of(left).place == info_of(right).place
    if isinstance(left, ReadDtype) and isinstance(right, ReadDtype):
        return left.dtype == right.dtype
    if type(left) is not type(right):
        return False
    if isinstance(left, float | complex):
        return repr(left) == repr(right)
    if hasattr(left, "tobytes"):  # an array of NumPy
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):  # such as arrays, whose comparison has no single answer
        return False


def _size_dimensions(
    settings: Sequence[Setting], shapes: Sequence[tuple[int, ...]], sizes: Sequence[Size]
) -> dict[Size, int]:
    if len({len(shape) for shape in shapes}) > 1:
        return {}
    return {
        size: dimension
        for size, dimension in product(sizes, range(len(shapes[0])))
        if all(
            shape[dimension] == setting.sizes[size] for setting, shape in zip(settings, shapes, strict=True)
        )
    }


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


def with_expressions_computed(trace: TraceGraph, sample: TraceSample, prefix: str) -> TraceGraph:
    """Return the graph that is cut into layers; `prefix` begins the names of its constants."""
    computed = _Computed(trace, prefix)
    needed = _needed_calls(trace, sample)
    for node in trace.steps:
        if info_of(node).call in needed:
            computed.add(node)
    return computed.with_output(trace)


def _needed_calls(trace: TraceGraph, sample: TraceSample) -> set[int]:
    """The calls that the output depends on, and those that do more than return something."""
    used = _places_in(trace.output)
    needed: set[int] = set()
    for node in reversed(trace.steps):
        info = info_of(node)
        is_used = info.is_impure or info.place in used or (info.decides and _is_guarded(node, sample))
        if is_used or info.call in needed:
            needed.add(info.call)
            used |= _places_in(node)
    return needed


def _places_in(node: fx.Node) -> set[Place | None]:
    sources = {leaf.source for leaf in _leaves(node) if isinstance(leaf, DtypeOf)}
    return {info_of(each).place for each in node.all_input_nodes} - {None} | sources


def _is_guarded(node: fx.Node, sample: TraceSample) -> bool:
    """Whether a decision on values must be checked at run time.

    Not if the values come from sizes alone. Nor if masks alone decide whether to do something: the trace has seen
    padding, and a model that skips its mask where there is none computes the same with it.
    """
    sources = {name for each in node.all_input_nodes for name in info_of(each).depends_on}
    return not sources <= (sample.masks if isinstance(info_of(node).result, bool) else set())


@final
class _Computed:
    """A graph in which nodes compute what the arguments of a generalized trace only say."""

    def __init__(self, trace: TraceGraph, prefix: str) -> None:
        self._graph = fx.Graph()
        self._constants: dict[str, Any] = {}
        self._prefix = prefix
        self._copies: dict[fx.Node, fx.Node] = {}
        self._tensors: dict[Place | None, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._info = NodeInfo()
        for node in trace.inputs:
            self._note(node, add_node(self._graph, node.op, node.target, (), {}, info_of(node)))
        self._sizes = {size: self._size_node(trace.inputs, size) for size in trace.sizes}

    def add(self, node: fx.Node) -> None:
        self._info = info = info_of(node)
        args, kwargs = map_aggregate((node.args, node.kwargs), self._argument)
        if info.decides:
            message = f"{info.line} went on with {info.result!r} when the model was traced"
            result = map_aggregate(info.expected, self._argument)
            checked = (self._argument(node.target), args, kwargs, result, message, info.modules[-1])
            self._function(check_decision, checked, type(None))
        else:
            self._note(node, add_node(self._graph, node.op, node.target, args, kwargs, info))

    def with_output(self, trace: TraceGraph) -> TraceGraph:
        self._info = NodeInfo(call=self._info.call)
        self._graph.output(map_aggregate(trace.output.args[0], self._argument))
        return replace(trace, graph=self._graph, constants=self._constants)

    def _note(self, node: fx.Node, copied: fx.Node) -> None:
        self._copies[node] = copied
        self._tensors[info_of(node).place] = copied

    def _size_node(self, inputs: Sequence[fx.Node], size: Size) -> fx.Node:
        tensor, dimension = size.places[0]
        args = (self._copies[inputs[tensor]], dimension)
        return add_node(self._graph, "call_method", "size", args, {}, NodeInfo(kind=int, size=size))

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return self._attribute(str(leaf.target)) if leaf.op == "get_attr" else self._copies[leaf]
        if isinstance(leaf, Device):
            return self._function(device_of_input, (), torch.device)
        if isinstance(leaf, DtypeOf):
            source = leaf.source
            tensor = self._attribute(source) if isinstance(source, str) else self._tensors[source]
            return self._function(getattr, (tensor, "dtype"), torch.dtype)
        if isinstance(leaf, SizeExpression):
            size = self._size(leaf)
            return size if leaf.kind is int else self._function(float, (size,), float)
        if isinstance(leaf, ByMode):
            return self._by_mode(leaf)
        if type(leaf) in _WRITTEN:
            return leaf
        name = f"{self._prefix}{len(self._constants)}"
        self._constants[name] = leaf.tensor if isinstance(leaf, ConstantTensor) else leaf
        return self._attribute(name)

    def _attribute(self, path: str) -> fx.Node:
        if path not in self._attributes:
            self._attributes[path] = self._graph.get_attr(path)
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

    def _by_mode(self, leaf: ByMode) -> Any:
        """Read `training` of the module in whose forward the call is, when the layer runs."""
        owner = self._info.modules[-1]
        training = self._attribute(f"{owner}.training" if owner else "training")
        if leaf.training is True and leaf.evaluation is False:
            return training
        choices = (self._argument(choice) for choice in (leaf.training, leaf.evaluation))
        return self._function(choose, (training, *choices), type(None))

    def _function(self, target: Callable[..., Any], args: tuple[Any, ...], kind: type) -> fx.Node:
        info = NodeInfo(call=self._info.call, modules=self._info.modules, kind=kind)
        return add_node(self._graph, "call_function", target, args, {}, info)
