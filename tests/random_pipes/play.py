"""Calls a pipe as its recipe says, and does the same with plain autograd on the same micro-batches.

Plain autograd forwards each micro-batch on its own copy of the rows and runs its backward on its own, in ascending
order. What comes of it is a list of rounds, to be compared to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker
from tests.random_pipes.layers import merge, rebuilt, tensors_in
from tests.random_pipes.recipe import Recipe

ROUNDS = 2
"""A pipe learns from the first call of a mode; the second one goes by what it learnt."""


@dataclass
class Story:
    """What happened, round by round."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    """Those that end the story; with plain autograd, all that its micro-batches raised."""


@contextlib.contextmanager
def mode_of(recipe: Recipe, cache: bool = True) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if recipe.grad_mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif recipe.grad_mode == "inference":
            stack.enter_context(torch.inference_mode())
        if recipe.autocast:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache))
        yield


def loss_of(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(merge(output).to(target.dtype), target)


def given_grad(recipe: Recipe, value: Any) -> tuple[Any, list[Tensor]]:
    """The input as the recipe wants it, and the leaves behind it."""
    if recipe.input_grad == "none":
        return value, []
    leaves = [tensor.requires_grad_() for tensor in tensors_in(value)]
    if recipe.input_grad == "leaf":
        return value, leaves
    return rebuilt(value, lambda tensor: tensor * 1.5), leaves


def chosen(model: nn.Module) -> list[nn.Parameter]:
    """Every other parameter that can be differentiated."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad][::2]


def prepare(recipe: Recipe, model: nn.Module) -> dict[str, Tensor]:
    """Gradients that are there before the first call."""
    if recipe.keeps_grad:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25) if parameter.requires_grad else None
    return {name: leaf.grad for name, leaf in model.named_parameters() if leaf.grad is not None}


def seen_after(model: nn.Module, before: dict[str, Tensor], leaves: Sequence[Tensor]) -> dict[str, Any]:
    """Gradients, buffers, and whether existing gradients were added into."""
    facts: dict[str, Any] = {f"input gradient {i}": leaf.grad for i, leaf in enumerate(leaves)}
    for name, parameter in model.named_parameters():
        facts[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        if name in before:
            facts[f"gradient of {name} is the tensor it was"] = parameter.grad is before[name]
    facts |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return facts


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)


def detached(value: Any) -> Any:
    return rebuilt(value, lambda tensor: tensor.detach().clone())


def play_pipe(recipe: Recipe, *, whole: bool) -> Story:
    story = Story()
    with recipe.pipe(whole=whole) as pipe:
        before = prepare(recipe, pipe)
        for round in range(ROUNDS):
            torch.manual_seed(round)
            try:
                facts = _call_pipe(recipe, pipe, round)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is compared
                story.errors.append(error)
                return story
            story.rounds.append(facts | seen_after(pipe, before, facts.pop("leaves")))
            update(pipe)
    return story


def _call_pipe(recipe: Recipe, pipe: GPipe, round: int) -> dict[str, Any]:
    value, leaves = given_grad(recipe, recipe.value(round))
    target = recipe.target(round)
    facts: dict[str, Any] = {"leaves": leaves}
    if recipe.call == "step":
        with mode_of(recipe):
            loss, output = pipe.step(value, target, loss_of, key=round, return_output=True)
        return facts | {"loss": loss, "output": output}
    with mode_of(recipe):
        output = pipe(value)
        if recipe.call == "two_forwards":
            more, more_leaves = given_grad(recipe, recipe.value(round + 100))
            second = pipe(more)
            leaves += more_leaves
    facts["output"] = detached(output)
    if recipe.call == "forward":
        return facts
    loss = loss_of(output, target)
    if recipe.call == "backward":
        loss.backward()
    elif recipe.call == "backward_twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif recipe.call == "backward_inputs":
        loss.backward(inputs=[*chosen(pipe), *leaves] or None)
    elif recipe.call == "grad":
        wanted = [*chosen(pipe), *leaves]
        # Without any, the loss depends on nothing that can be differentiated, and backward says so.
        facts["gradients"] = (
            torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else loss.backward()
        )
    else:
        loss.backward()
        loss_of(second, target).backward()
        facts["second output"] = detached(second)
    return facts | {"loss": loss.detach()}


@dataclass
class Passage:
    """One mini-batch that went through the plain sequence."""

    sizes: list[int]
    inputs: list[Any]
    outputs: list[Any]

    @property
    def output(self) -> Any:
        """Joined, as a leaf that receives the gradient of the loss."""
        columns = [torch.cat(column) if column[0].dim() else column[0] for column in self._columns()]
        needed = [any(tensor.requires_grad for tensor in column) for column in self._columns()]
        leaves = iter(
            [leaf.detach().requires_grad_(need) for leaf, need in zip(columns, needed, strict=True)]
        )
        return rebuilt(self.outputs[0], lambda _: next(leaves))

    def _columns(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(tensors_in(output) for output in self.outputs), strict=True))

    def backward(self, output: Any, inputs: Sequence[Tensor] | None = None, *, keep: bool = False) -> None:
        """From the gradients of the joined output, micro-batch by micro-batch."""
        joined = [leaf.grad for leaf in tensors_in(output)]
        shares = [None if grad is None else grad.split(self.sizes) for grad in joined]
        for index, piece in enumerate(self.outputs):
            pairs = [
                (tensor, share[index])
                for tensor, share in zip(tensors_in(piece), shares, strict=True)
                if share is not None and tensor.requires_grad
            ]
            if pairs:
                entered = [leaf for leaf in tensors_in(self.inputs[index]) if leaf.requires_grad]
                torch.autograd.backward(
                    *map(list, zip(*pairs, strict=True)),
                    retain_graph=keep,
                    inputs=None if inputs is None else [*inputs, *entered],
                )

    def input_gradients(self) -> list[Tensor | None]:
        columns = zip(*(tensors_in(piece) for piece in self.inputs), strict=True)
        return [
            torch.cat([leaf.grad for leaf in column])
            if all(leaf.grad is not None for leaf in column)
            else None
            for column in columns
        ]


class Plain:
    """The plain sequence and its story."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = recipe.model()
        self.story = Story()

    def play(self) -> Story:
        before = prepare(self.recipe, self.model)
        for round in range(ROUNDS):
            facts = self._step(round) if self.recipe.call == "step" else self._call(round)
            if self.story.errors:
                break
            leaves = facts.pop("leaves")
            self.story.rounds.append(facts | seen_after(self.model, before, leaves))
            update(self.model)
        return self.story

    def _pieces(self, value: Any) -> tuple[list[int], list[Any]]:
        count = max(1, min(self.recipe.rows, self.recipe.chunks))
        small, larger = divmod(self.recipe.rows, count)
        sizes = [small + (index < larger) for index in range(count)]
        columns = [
            [piece.detach().clone().requires_grad_(tensor.requires_grad) for piece in tensor.split(sizes)]
            for tensor in tensors_in(value)
        ]
        rows = [iter(row) for row in zip(*columns, strict=True)]
        return sizes, [rebuilt(value, lambda _, row=row: next(row)) for row in rows]

    def _run(self, piece: Any) -> Any:
        with mode_of(self.recipe, cache=False), use_skip_tracker(DictionarySkipTracker()):
            return self.model(piece)

    def _forward(self, value: Any) -> Passage | None:
        sizes, pieces = self._pieces(value)
        outputs = []
        for piece in pieces:
            with self._noting():
                outputs.append(self._run(piece))
        return None if self.story.errors else Passage(sizes, pieces, outputs)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            self.story.errors.append(error)

    def _step(self, round: int) -> dict[str, Any]:
        value, leaves = given_grad(self.recipe, self.recipe.value(round))
        sizes, pieces = self._pieces(value)
        losses, outputs = [], []
        for piece, target in zip(pieces, self.recipe.target(round).split(sizes), strict=True):
            with self._noting():
                output = self._run(piece)
                outputs.append(output)
                with mode_of(self.recipe, cache=False):
                    loss = loss_of(output, target) * (len(target) / self.recipe.rows)
                losses.append(loss.detach())
                if loss.requires_grad:
                    loss.backward()
        if self.story.errors:
            return {}
        passage = Passage(sizes, pieces, outputs)
        self._give(value, leaves, passage)
        return {"leaves": leaves, "loss": torch.stack(losses).sum(), "output": detached(passage.output)}

    def _call(self, round: int) -> dict[str, Any]:
        value, leaves = given_grad(self.recipe, self.recipe.value(round))
        passages, values = [self._forward(value)], [(value, leaves)]
        if self.recipe.call == "two_forwards":
            values.append(given_grad(self.recipe, self.recipe.value(round + 100)))
            passages.append(self._forward(values[1][0]))
        if self.story.errors:
            return {}
        facts: dict[str, Any] = {"leaves": [leaf for _, some in values for leaf in some]}
        facts["output"] = detached(passages[0].output)
        if len(passages) > 1:
            facts["second output"] = detached(passages[1].output)
        if self.recipe.call == "forward":
            return facts
        for (each, some), passage in zip(values, passages, strict=True):
            with self._noting():
                facts.setdefault("loss", self._backward(each, some, passage, round, facts))
        return facts

    def _backward(
        self, value: Any, leaves: list[Tensor], passage: Passage, round: int, facts: dict[str, Any]
    ) -> Tensor:
        output = passage.output
        loss = loss_of(output, self.recipe.target(round))
        loss.backward()
        call, wanted = self.recipe.call, chosen(self.model)
        if call == "grad":
            facts["gradients"] = self._gradients(wanted, passage, output, value, leaves)
            return loss.detach()
        if call == "backward_twice":
            passage.backward(output, keep=True)
            self._give(value, leaves, passage, keep=True)
        passage.backward(output, wanted if call == "backward_inputs" and wanted + leaves else None)
        self._give(value, leaves, passage)
        return loss.detach()

    def _gradients(
        self, wanted: list[nn.Parameter], passage: Passage, output: Any, value: Any, leaves: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """autograd.grad leaves every .grad as it is."""
        kept = [parameter.grad for parameter in wanted]
        for parameter in wanted:
            parameter.grad = None
        if wanted or leaves:
            passage.backward(output, wanted)
        self._give(value, leaves, passage)
        gradients = [leaf.grad for leaf in [*wanted, *leaves]]
        for parameter, gradient in zip([*wanted, *leaves], [*kept, *(None for _ in leaves)], strict=True):
            parameter.grad = gradient
        return tuple(gradients)

    def _give(self, value: Any, leaves: list[Tensor], passage: Passage, *, keep: bool = False) -> None:
        """The micro-batches' input gradients to the input, and to what it was computed from."""
        if not leaves:
            return
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors_in(value), passage.input_gradients(), strict=True)
            if gradient is not None
        ]
        for piece in passage.inputs:
            for leaf in tensors_in(piece):
                leaf.grad = None
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)), retain_graph=keep)
