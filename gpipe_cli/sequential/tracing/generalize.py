"""From recordings of a model at several sizes, in both modes and in two dtypes to one program for all of them.

The recordings must agree call by call. Where an argument differs between them, it becomes an expression: a whole number
that depends on the sizes of the inputs, a value for each mode, or the dtype of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias, final

from gpipe_cli.sequential.tracing.recording import (
    Attribute,
    Call,
    NotRecordable,
    ReadDtype,
    Recording,
    Ref,
    leaves_of,
    map_tree,
    structure_of,
)
from gpipe_cli.sequential.tracing.sample import Size

Terms: TypeAlias = tuple[tuple[tuple[Size, ...], int], ...]
"""Products of sizes with their factors; the empty product is 1."""


@final
@dataclass(frozen=True)
class Setting:
    """How a recording was made."""

    training: bool
    sizes: Mapping[Size, int]
    other_dtype: bool = False


@final
@dataclass(frozen=True, slots=True)
class SizeExpression:
    """A sum of products of sizes, such as 4 * batch * length + 1."""

    terms: Terms

    def at(self, sizes: Mapping[Size, int]) -> int:
        total = 0
        for factors, coefficient in self.terms:
            for size in factors:
                coefficient *= sizes[size]
            total += coefficient
        return total


@final
@dataclass(frozen=True, slots=True)
class ByMode:
    training: Any
    evaluation: Any


@final
@dataclass(frozen=True, slots=True)
class DtypeOf:
    source: Ref | Attribute


@final
@dataclass(frozen=True, eq=False)
class Program:
    """What a model does, for all settings that it was made from."""

    recording: Recording
    """One of the recordings."""
    arguments: list[Any]
    """For each call (args, kwargs) with expressions."""
    results: list[Any]
    """For each call that reads values what it returned, with expressions; None for others."""
    output: Any
    sizes: tuple[Size, ...]
    """Those that vary."""
    dimensions: list[dict[Size, int]]
    """For each tensor the dimensions that are equal to a size, whatever it is."""

    def used_sizes(self) -> set[Size]:
        leaves = (leaf for tree in (*self.arguments, self.output) for leaf in leaves_of(tree))
        return {size for leaf in leaves for size in _sizes_of(leaf)}


def _sizes_of(leaf: Any) -> set[Size]:
    if isinstance(leaf, ByMode):
        return _sizes_of(leaf.training) | _sizes_of(leaf.evaluation)
    return (
        {size for factors, _ in leaf.terms for size in factors} if isinstance(leaf, SizeExpression) else set()
    )


def generalize(recordings: Sequence[tuple[Setting, Recording]], sizes: Sequence[Size]) -> Program:
    """Return a program for settings that vary these sizes; raise NotRecordable with the first call that has none."""
    settings = [setting for setting, _ in recordings]
    runs = [recording for _, recording in recordings]
    for run in runs[1:]:
        _check_alignment(runs[0], run)
    merger = _Merger(settings, sizes)
    arguments = [
        merger.merge(calls[0], [call.arguments for call in calls])
        for calls in zip(*(run.calls for run in runs), strict=True)
    ]
    results = [
        merger.merge(calls[0], [call.result for call in calls])
        for calls in zip(*(run.calls for run in runs), strict=True)
    ]
    output = merger.merge(None, [run.output for run in runs])
    shapes = zip(*([value.shape for value in run.values] for run in runs), strict=True)
    dimensions = [_size_dimensions(settings, of_runs, sizes) for of_runs in shapes]
    return Program(runs[0], arguments, results, output, tuple(sizes), dimensions)


def check(program: Program, setting: Setting, recording: Recording) -> None:
    """Raise NotRecordable unless the program does what a recording at other sizes did.

    Dimensions that are not equal to a size after all are removed from the program.
    """
    _check_alignment(program.recording, recording)
    for expected, result, call in zip(program.arguments, program.results, recording.calls, strict=True):
        _check_arguments(expected, call.arguments, setting, call)
        _check_arguments(result, call.result, setting, call)
    _check_arguments(program.output, recording.output, setting, None)
    for dimensions, value in zip(program.dimensions, recording.values, strict=True):
        for size, dimension in list(dimensions.items()):
            # Equal only at some sizes, as in `ids[:, :512]`.
            if value.shape[dimension] != setting.sizes[size]:
                del dimensions[size]


def check_modules(program: Program, _setting: Setting, recording: Recording) -> None:
    """Raise NotRecordable unless the program calls the modules that a recording at other sizes called."""
    expected, actual = (
        [call.target for call in run.calls if isinstance(call.target, str)]
        for run in (program.recording, recording)
    )
    if expected != actual or program.recording.template != recording.template:
        raise NotRecordable("", None, "it calls other modules at other sizes")


def _check_arguments(expected: Any, actual: Any, setting: Setting, call: Call | None) -> None:
    for expression, leaf in zip(leaves_of(expected), leaves_of(actual), strict=True):
        if isinstance(expression, ByMode):
            expression = expression.training if setting.training else expression.evaluation
        if isinstance(expression, SizeExpression):
            expression = expression.at(setting.sizes)
        if isinstance(expression, DtypeOf) or isinstance(leaf, ReadDtype):
            continue
        if not _same(expression, leaf):
            raise _differs(
                call, f"an argument that it computes was {leaf!r} at other sizes, not {expression!r}"
            )


def _check_alignment(one: Recording, other: Recording) -> None:
    """Raise NotRecordable, with the innermost module that made the difference, unless both make the same calls."""
    for left, right in zip(one.calls, other.calls, strict=False):
        if left.target != right.target or len(left.values) != len(right.values):
            raise _diverged(left, right)
        if left.modules != right.modules or left.grad != right.grad or left.writes != right.writes:
            raise _diverged(left, right)
        if structure_of(left.arguments) != structure_of(right.arguments):
            raise _diverged(left, right)
        if structure_of(left.result) != structure_of(right.result):
            raise _diverged(left, right)
    if len(one.calls) != len(other.calls) or one.template != other.template:
        reason = "it returns something else, or calls more functions, at other sizes or in other calls"
        raise NotRecordable("", None, reason)


def _diverged(left: Call, right: Call) -> NotRecordable:
    common = [path for path, other in zip(left.modules, right.modules, strict=False) if path == other]
    reason = f"it does not do the same at every size, or in every call ({_name(left)} became {_name(right)})"
    return NotRecordable(common[-1], left.line, reason)


def _differs(call: Call | None, reason: str) -> NotRecordable:
    path, line = ("", None) if call is None else (call.modules[-1], call.line)
    return NotRecordable(path, line, reason)


def _name(call: Call) -> str:
    return f"'{call.target}'" if isinstance(call.target, str) else call.target.__name__


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

    def merge(self, call: Call | None, trees: Sequence[Any]) -> Any:
        columns = iter(zip(*map(leaves_of, trees), strict=True))

        def merged(_: Any) -> Any:
            leaves = next(columns)
            try:
                return self._merge_leaf(leaves)
            except ValueError as error:
                raise _differs(call, str(error)) from error

        return map_tree(merged, trees[0])

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
        if any(isinstance(leaf, Ref | Attribute) for leaf in by_mode):
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
