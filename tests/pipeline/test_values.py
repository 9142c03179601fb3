"""What may enter, pass between layers and leave: any nesting of containers, with passengers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gpipe_cli
from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe
from tests.support.pipes import CHECKPOINTS, Do

pytestmark = pytest.mark.timeout(60)


class Point(NamedTuple):
    main: Any
    note: Any


def same(expected: Any, given: Any) -> None:
    """Equal to the bit, containers and passengers included."""
    assert type(given) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(given, expected)
    elif isinstance(expected, dict):
        assert list(given) == list(expected)
        for key in expected:
            same(expected[key], given[key])
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected)
        for mine, theirs in zip(expected, given, strict=True):
            same(mine, theirs)
    else:
        assert given == expected


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a word at the end": lambda x: (x, "word"),
    "None": lambda x: (x, None),
    "a list": lambda x: [x, x * 2],
    "a singleton": lambda x: (x,),
    "a dict": lambda x: {"a": x, "b": {"c": x * 2, "d": 7}},
    "a named tuple": lambda x: Point(x, Point(x * 2, 0.5)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])
def test_any_value_leaves_the_pipe_in_the_container_it_came_in(kind: str, plain: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Do(OUTPUTS[kind]))
    input = torch.randn(4, 3)
    expected = model(input)
    pipe = plain_pipe(model, chunks=2) if plain else GPipe(model, [1, 1], chunks=2)
    with pipe:
        same(expected, pipe(input))
        _, output = pipe.step(
            input,
            torch.zeros(4, 3),
            lambda output, target: sum(t.sum() for t in tensors_in(output)),
            return_output=True,
        )
        same(expected, output)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value: Any) -> Tensor:
        first, second = value.values() if isinstance(value, dict) else value
        return self.linear(first) * second


@pytest.mark.parametrize(
    "form", [tuple, list, lambda pair: dict(zip("ab", pair, strict=True)), lambda p: Point(*p)]
)
@pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])
def test_several_inputs_are_given_as_one_value(form: Callable[[Any], Any], plain: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Add(), nn.Linear(3, 3))
    inputs = [torch.randn(5, 3, requires_grad=True) for _ in range(2)]
    expected = torch.cat(
        [model(pair) for pair in zip(*(each.tensor_split(2) for each in inputs), strict=True)]
    )
    pipe = plain_pipe(model, chunks=2) if plain else GPipe(model, [1, 1], chunks=2)
    with pipe:
        same(expected.detach(), pipe(form(inputs)).detach())
        pipe.step(form(inputs), torch.zeros(5, 3), functional.mse_loss, key=0)
    mine = [each.grad for each in inputs]
    for each in inputs:
        each.grad = None
    for first, second, target in zip(
        *(each.tensor_split(2) for each in (*inputs, torch.zeros(5, 3))), strict=True
    ):
        (functional.mse_loss(model((first, second)), target) * (len(first) / 5)).backward()
    for gradient, each in zip(mine, inputs, strict=True):
        assert torch.equal(gradient, each.grad)


@pytest.mark.parametrize("plain", [False, True], ids=["GPipe", "plain_pipe"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_that_is_not_to_be_split_reaches_every_micro_batch_whole(
    plain: bool, requires_grad: bool
) -> None:
    mask = torch.arange(3.0).requires_grad_(requires_grad)
    masks: list[Any] = []

    def masked(value: Any) -> Tensor:
        masks.append(value[1])
        return value[0] * value[1]

    model = nn.Sequential(Do(masked), nn.Linear(3, 3))
    pipe = plain_pipe(model, chunks=2) if plain else GPipe(model, [1, 1], chunks=2)
    input = torch.randn(4, 3)
    with pipe:
        output = pipe((input, gpipe_cli.NoChunk(mask)))
        assert all(type(each) is Tensor and each.shape == (3,) for each in masks)
        assert len(masks) == 2
        torch.testing.assert_close(output, model((input, mask)))
        output.sum().backward()
    if requires_grad:
        mine, mask.grad = mask.grad, None
        model((input, mask)).sum().backward()
        torch.testing.assert_close(mine, mask.grad)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_step_takes_a_tensor_that_is_not_to_be_split(checkpoint: str) -> None:
    torch.manual_seed(0)
    mask = torch.randn(3, requires_grad=True)
    model = nn.Sequential(Do(lambda v: v["x"] * v["mask"]), nn.Linear(3, 3))
    input, target = torch.randn(4, 3), torch.randn(4, 3)
    with GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        pipe.step({"x": input, "mask": gpipe_cli.NoChunk(mask)}, target, functional.mse_loss)
    mine, mask.grad = mask.grad, None
    functional.mse_loss(model({"x": input, "mask": mask}), target).backward()
    torch.testing.assert_close(mine, mask.grad)


class Convertible:
    """Whatever str() and int() take."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)

    def __int__(self) -> int:
        return int(self.value)


def test_chunks_and_checkpoint_are_converted_as_in_torchgpipe() -> None:
    pipe = GPipe(
        nn.Sequential(nn.Linear(1, 1)), balance=(1,), chunks=Convertible(42), checkpoint=Convertible("always")
    )
    assert (pipe.chunks, pipe.checkpoint) == (42, "always")
    assert type(pipe.chunks) is int
    assert type(pipe.checkpoint) is str


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_plain_pipe_takes_a_step_with_a_computed_input(chunks: int) -> None:
    """The second micro-batch's backward went through a graph that the first one had freed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    leaf, target = torch.randn(6, 3), torch.randn(6, 3)
    gradients = []
    for pipe in (plain_pipe(model, chunks=chunks), GPipe(model, [1, 2], chunks=chunks)):
        mine = leaf.clone().requires_grad_()
        pipe.step(mine.exp(), target, functional.mse_loss, key=0)
        gradients.append(mine.grad)
        pipe.close()
    mine = leaf.clone().requires_grad_()
    functional.mse_loss(model(mine.exp()), target).backward()
    assert torch.equal(*gradients)
    torch.testing.assert_close(gradients[0], mine.grad)


class WithToken(nn.Module):
    """Returns a view of a parameter next to its input, as vision transformers do with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input * 2, self.token.expand(len(input), -1)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_view_of_a_parameter_may_pass_with_and_without_a_graph(checkpoint: str) -> None:
    """Without a graph torch says of such a view that it requires grad, because its base does."""
    model = nn.Sequential(WithToken(), Do(lambda pair: pair[0] * pair[1]), nn.Linear(4, 4))
    input, target = torch.randn(4, 4), torch.randn(4, 4)
    expected = model(input)
    functional.mse_loss(expected, target).backward()
    expected = expected.detach()
    gradients = [parameter.grad for parameter in model.parameters()]
    with GPipe(model, [1, 2], devices=["cpu", "cpu"], chunks=2, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(pipe(input), expected)
            model.zero_grad()
            pipe.step(input, target, functional.mse_loss)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)
