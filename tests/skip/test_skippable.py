"""Layers with skips in a plain nn.Sequential, every way to misuse them, their verification and their routes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.skip import (
    Namespace,
    SkipName,
    Skippable,
    SkipRoute,
    pop,
    skip_layout,
    skippable,
    stash,
    verify_skippables,
)


@skippable(stash=["skip"])
class Begin(nn.Module):
    """Stashes its input."""

    def __init__(self, width: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("skip", input)
        return self.linear(input)


@skippable(pop=["skip"])
class End(nn.Module):
    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        skip = yield pop("skip")
        return input if skip is None else input + 2 * skip


def test_a_skip_reaches_its_pop_with_its_gradient() -> None:
    model = nn.Sequential(Begin(), nn.Tanh(), End())
    input = torch.randn(4, 3, requires_grad=True)
    output = model(input)
    expected = model[1](model[0].module.linear(input)) + 2 * input
    assert torch.equal(output, expected)
    (gradient,) = torch.autograd.grad(output.sum(), input)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), input)
    assert torch.equal(gradient, expected_gradient)


def test_constructor_arguments_reach_the_module_and_the_class_keeps_its_name_and_docstring() -> None:
    layer = Begin(5, bias=False)
    assert layer.module.linear.weight.shape == (5, 5)
    assert layer.module.linear.bias is None
    assert (Begin.__name__, Begin.__doc__, Begin.__module__) == ("Begin", "Stashes its input.", __name__)


def test_repr_shows_the_module() -> None:
    assert repr(Begin()) == (
        "@skippable(Begin(\n  (linear): Linear(in_features=3, out_features=3, bias=True)\n))"
    )


def test_copies_and_pickles_work_and_stay_in_their_namespace() -> None:
    pair = nn.Sequential(Begin(), End())
    namespace = Namespace()
    for layer in pair:
        layer.isolate(namespace)
    input = torch.randn(2, 3)
    for duplicate in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):  # noqa: S301 - our own bytes
        assert torch.equal(duplicate(input), pair(input))
        assert torch.equal(nn.Sequential(pair[0], duplicate[1])(input), pair(input))


def test_none_may_be_stashed() -> None:
    @skippable(stash=["skip"])
    class Nothing(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            yield stash("skip", None)
            return input

    input = torch.randn(2, 3)
    assert torch.equal(nn.Sequential(Nothing(), End())(input), input)


def test_namespaces_keep_skips_of_one_name_apart() -> None:
    outer, inner = Namespace(), Namespace()
    layers = [Begin().isolate(outer), Begin().isolate(inner), End().isolate(outer), End().isolate(inner)]
    input = torch.randn(2, 3)
    first = layers[0].module.linear(input)
    second = layers[1].module.linear(first)
    assert torch.equal(nn.Sequential(*layers)(input), second + 2 * input + 2 * first)


def test_only_the_names_given_are_isolated() -> None:
    @skippable(stash=["a", "b"])
    class Both(nn.Module):
        pass

    namespace = Namespace()
    layer = Both().isolate(namespace, only=["b"])
    assert [(skip.name, skip.namespace == namespace) for skip in layer.stashable()] == [
        ("a", False),
        ("b", True),
    ]


class SkipsInTuple(nn.Module):
    """A layer whose skips travel in its input and output: what a program makes of `dispatch` and `namespaced`."""

    def __init__(self, layer: nn.Module, before: list[tuple[Any, str]], after: list[tuple[Any, str]]) -> None:
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, given: Any) -> Any:
        input, *values = given if self.before else (given,)
        skips = dict(zip(self.before, values, strict=True))
        if not isinstance(self.layer, Skippable):
            return (self.layer(input), *values)
        layer = self.layer

        def handle_stash(name: str, value: Tensor | None) -> None:
            namespace, name = layer.namespaced(name)
            assert value is not None
            skips[namespace, name] = value

        output = layer.dispatch(input, handle_stash, lambda name: skips[layer.namespaced(name)])
        return (output, *(skips[key] for key in self.after)) if self.after else output


def test_a_program_can_carry_skips_itself_as_torchgpipe_s_timeline_benchmark_does() -> None:
    """A skip name could not be unpacked, and layers had neither `namespaced` nor `dispatch`."""
    outer = Namespace()
    layers = [Begin().isolate(outer), nn.Tanh(), Begin(), End(), nn.Tanh(), End().isolate(outer)]
    seats: dict[tuple[Any, str], None] = {}
    in_tuples = []
    for layer in layers:
        before = list(seats)
        if isinstance(layer, Skippable):
            for namespace, name in layer.stashable():
                seats[namespace, name] = None
            for namespace, name in layer.poppable():
                del seats[namespace, name]
        in_tuples.append(SkipsInTuple(layer, before, list(seats)) if before or seats else layer)
    input = torch.randn(4, 3)
    assert torch.equal(nn.Sequential(*in_tuples)(input), nn.Sequential(*layers)(input))


def test_the_namespace_of_a_skip_is_none_until_it_is_isolated() -> None:
    layer, namespace = Begin(), Namespace()
    assert layer.namespaced("skip") == (None, "skip")
    assert list(layer.isolate(namespace).stashable()) == [(namespace, "skip")]
    assert layer.isolate(None).namespaced("skip") == (None, "skip")


def test_skips_without_a_namespace_sort_before_isolated_ones() -> None:
    names = [SkipName(Namespace(), "a"), SkipName(None, "b"), SkipName(None, "a")]
    assert sorted(names) == [names[2], names[1], names[0]]


def test_skippables_may_be_nested_in_each_other_and_in_sequences() -> None:
    @skippable(stash=["outer"], pop=["inner"])
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Sequential(Inner())

        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            yield stash("outer", input)
            output = self.inside(input)
            return output + (yield pop("inner"))

    @skippable(stash=["inner"], pop=["outer"])
    class Inner(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            outer = yield pop("outer")
            yield stash("inner", 3 * input)
            return input + outer

    assert torch.equal(Outer()(torch.ones(2)), torch.full((2,), 5.0))


def test_a_forward_without_yield_is_a_plain_layer() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input + 1

    assert torch.equal(Plain()(torch.zeros(2)), torch.ones(2))


def yielding(*commands: Any, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            yield from commands
            return input

    return Layer()


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (yielding(pop("x"), pops=("x",)), RuntimeError, "^'x' has not been stashed$"),
        (yielding(stash("x", None)), RuntimeError, "^'x' has not been declared as stashable$"),
        (yielding(pop("x")), RuntimeError, "^'x' has not been declared as poppable$"),
        (yielding(stashes=("y", "x")), RuntimeError, "^'x', 'y' must be stashed but have not$"),
        (yielding(pops=("x",)), RuntimeError, "^'x' must be popped but have not$"),
        (yielding("hello"), TypeError, "^'hello' is not a command from @skippable$"),
    ],
)
def test_a_forward_that_breaks_its_declaration_is_an_error(
    layer: nn.Module, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        layer(torch.zeros(2))


def test_a_skip_is_popped_once_only() -> None:
    model = nn.Sequential(Begin(), End(), End())
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        model(torch.zeros(2, 3))


def test_only_tensors_and_none_can_be_stashed() -> None:
    with pytest.raises(TypeError, match=r"stash\('x', ...\) takes a Tensor or None, got list"):
        stash("x", [])  # type: ignore[arg-type]


def test_a_string_instead_of_a_list_of_names_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"pop takes a list of names, got the string 'skip'; write \['skip'\]"
    ):
        skippable(pop="skip")


def test_isolating_a_name_that_was_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="'skap' to isolate has not been declared"):
        Begin().isolate(Namespace(), only=["skap"])


def layer(*, stash: str = "", pop: str = "") -> Skippable:
    """A layer with each letter declared as a name, for tests that do not run a model."""
    return skippable(stash=list(stash), pop=list(pop))(type("Layer", (nn.Module,), {}))()


def isolated(*layers: Skippable) -> list[Skippable]:
    """Two pairs of layers, each in a namespace of its own."""
    spaces = Namespace(), Namespace()
    return [each.isolate(spaces[place % 2]) for place, each in enumerate(layers)]


def twice(each: nn.Module) -> nn.Module:
    return nn.Sequential(each, each)


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [layer(stash="a"), layer(stash="b"), nn.ReLU(), layer(pop="ab")],
        [layer(stash="a"), layer(pop="a", stash="b"), layer(pop="b")],
        [nn.Sequential(layer(stash="a")), nn.Sequential(nn.Sequential(layer(pop="a")))],
        isolated(layer(stash="a"), layer(stash="a"), layer(pop="a"), layer(pop="a")),
    ],
    ids=["none", "several", "in a row", "nested", "of one name, isolated"],
)
def test_matching_pairs_pass_verification(layers: list[nn.Module]) -> None:
    verify_skippables(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("layers", "problems"),
    [
        ([layer(stash="a")], ["no module declared 'a' as poppable but stashed"]),
        ([layer(pop="a")], ["'0' declared 'a' as poppable but it was not stashed"]),
        (
            [layer(pop="a"), layer(stash="a"), layer(pop="a")],
            [
                "'0' declared 'a' as poppable but it was not stashed",
                "'2' redeclared 'a' as poppable but not isolated by namespace",
            ],
        ),
        (
            [layer(stash="a"), layer(stash="a"), layer(pop="a"), nn.Sequential(layer(pop="a"))],
            [
                "'1' redeclared 'a' as stashable but not isolated by namespace",
                "'3.0' redeclared 'a' as poppable but not isolated by namespace",
            ],
        ),
        (
            [twice(layer(stash="a")), layer(pop="a")],
            ["'0.1' redeclared 'a' as stashable but not isolated by namespace"],
        ),
        ([layer(stash="a", pop="a")], ["'0' declared 'a' both as stashable and as poppable"]),
        (
            [layer(stash="a").isolate(Namespace()), layer(pop="a")],
            [
                "'1' declared 'a' as poppable but it was not stashed",
                "no module declared 'a' as poppable but stashed",
            ],
        ),
    ],
)
def test_all_problems_of_skips_that_do_not_match_are_listed(
    layers: list[nn.Module], problems: list[str]
) -> None:
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers))
    first, empty, *bullets = str(caught.value).split("\n")
    assert (first, empty) == ("one or more pairs of stash and pop do not match:", "")
    assert bullets == [f"* {problem}" for problem in problems]


@pytest.mark.parametrize(
    ("partitions", "sends", "receives"),
    [
        ([nn.Sequential(nn.ReLU()), nn.ReLU()], ["", ""], ["", ""]),
        ([nn.Sequential(layer(stash="a"), layer(pop="a")), nn.ReLU()], ["", ""], ["", ""]),
        (
            [layer(stash="ba"), layer(pop="a", stash="c"), nn.ReLU(), layer(pop="cb")],
            ["a1 b3", "c3", "", ""],
            ["", "a0", "", "b0 c1"],
        ),
        (
            [nn.Sequential(nn.Sequential(layer(stash="a"))), nn.Sequential(nn.Sequential(layer(pop="a")))],
            ["a1", ""],
            ["", "a0"],
        ),
    ],
    ids=["no skip", "within a partition", "next and far", "nested"],
)
def test_a_skip_that_crosses_has_a_route_at_both_ends_by_name(
    partitions: list[nn.Module], sends: list[str], receives: list[str]
) -> None:
    layout = skip_layout(partitions)
    assert (routes(layout.sends), routes(layout.receives)) == (sends, receives)


def routes(rows: tuple[tuple[SkipRoute, ...], ...]) -> list[str]:
    return [" ".join(f"{skip.name}{partition}" for skip, partition in row) for row in rows]


def test_skips_of_the_same_name_are_ordered_by_namespace() -> None:
    first, second = Namespace(), Namespace()
    begin = nn.Sequential(layer(stash="a").isolate(second), layer(stash="a").isolate(first))
    layout = skip_layout([begin, layer(pop="a").isolate(first), layer(pop="a").isolate(second)])
    assert (routes(layout.sends), routes(layout.receives)) == (["a1 a2", "", ""], ["", "a0", "a0"])
