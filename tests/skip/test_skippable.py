"""Layers with skips in a plain nn.Sequential: what they do, and every way to use them wrongly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.skip import Namespace, pop, skippable, stash


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


def test_constructor_arguments_reach_the_module_and_the_class_keeps_its_name_and_text() -> None:
    layer = Begin(5, bias=False)
    assert layer.module.linear.weight.shape == (5, 5)
    assert layer.module.linear.bias is None
    assert (Begin.__name__, Begin.__doc__, Begin.__module__) == ("Begin", "Stashes its input.", __name__)


def test_it_is_shown_with_its_module() -> None:
    assert repr(Begin()) == (
        "@skippable(Begin(\n  (linear): Linear(in_features=3, out_features=3, bias=True)\n))"
    )


def test_copies_and_pickles_work_and_stay_in_their_namespace() -> None:
    pair = nn.Sequential(Begin(), End())
    namespace = Namespace()
    for layer in pair:
        layer.isolate(namespace)
    input = torch.randn(2, 3)
    for twin in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):  # noqa: S301 - our own bytes
        assert torch.equal(twin(input), pair(input))
        assert torch.equal(nn.Sequential(pair[0], twin[1])(input), pair(input))


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


def undeclared(*commands: Any, stashes: tuple[str, ...] = (), pops: tuple[str, ...] = ()) -> nn.Module:
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            yield from commands
            return input

    return Layer()


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (undeclared(pop("x"), pops=("x",)), RuntimeError, "^'x' has not been stashed$"),
        (undeclared(stash("x", None)), RuntimeError, "^'x' has not been declared as stashable$"),
        (undeclared(pop("x")), RuntimeError, "^'x' has not been declared as poppable$"),
        (undeclared(stashes=("y", "x")), RuntimeError, "^'x', 'y' must be stashed but have not$"),
        (undeclared(pops=("x",)), RuntimeError, "^'x' must be popped but have not$"),
        (undeclared("hello"), TypeError, "^'hello' is not a command from @skippable$"),
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


def test_something_else_than_a_tensor_cannot_be_stashed() -> None:
    with pytest.raises(TypeError, match=r"stash\('x', ...\) takes a Tensor or None, got list"):
        stash("x", [])  # type: ignore[arg-type]


def test_a_string_in_the_place_of_a_list_of_names_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"pop takes a list of names, got the string 'skip'; write \['skip'\]"
    ):
        skippable(pop="skip")


def test_isolating_a_name_that_was_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="'skap' to isolate has not been declared"):
        Begin().isolate(Namespace(), only=["skap"])
