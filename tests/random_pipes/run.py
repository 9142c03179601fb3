"""Run a random pipe, and the same model with plain autograd on the same micro-batches.

Plain autograd runs each micro-batch on a copy of its rows, forward and backward, in ascending order. Both give a
record of two rounds, which `compare` compares to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker
from tests.random_pipes.case import RandomPipe
from tests.random_pipes.layers import Late, merge, rebuilt, tensors_in

ROUNDS = 2
"""A pipe observes its layers in the first call of a mode and relies on that in the second."""


@dataclass
class RunRecord:
    """Outputs, losses, gradients and buffers of every round."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    """The error that ended the run; with plain autograd, the errors of all micro-batches."""


@contextlib.contextmanager
def caller_modes(case: RandomPipe, cache: bool = True) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if case.grad_mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif case.grad_mode == "inference":
            stack.enter_context(torch.inference_mode())
        if case.autocast:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache))
        yield


def loss_of(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(merge(output).to(target.dtype), target)


class CountingLoss(nn.Module):
    """A loss that depends on how often it was called, which it counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        self.calls += 1
        return loss_of(output, target) * (1 + 0.125 * self.calls.clone())


def make_loss(case: RandomPipe) -> Callable[[Any, Tensor], Tensor]:
    counting = CountingLoss()
    losses: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "function": loss_of,
        "module": counting,
        "closure": lambda output, target: counting(output, target) * 2,
        "sum": lambda output, target: loss_of(output, target) * target.numel(),
    }
    return losses[case.loss]


def enter_round(model: nn.Module, round: int) -> None:
    for module in model.modules():
        if isinstance(module, Late):
            module.round = round


def make_input(case: RandomPipe, value: Any) -> tuple[Any, list[Tensor]]:
    """The input with the `requires_grad` of the case, and the leaves it was computed from."""
    if case.input_grad == "none":
        return value, []
    leaves = [tensor.requires_grad_() for tensor in tensors_in(value)]
    if case.input_grad == "leaf":
        return value, leaves
    return rebuilt(value, lambda tensor: tensor * 1.5), leaves


def prepare(case: RandomPipe, model: nn.Module) -> dict[str, Tensor]:
    """Give parameters the gradients that the case starts with, and return them."""
    if case.has_grad:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25) if parameter.requires_grad else None
    return {name: leaf.grad for name, leaf in model.named_parameters() if leaf.grad is not None}


def state_after(model: nn.Module, before: dict[str, Tensor], leaves: Sequence[Tensor]) -> dict[str, Any]:
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


def run_pipe(case: RandomPipe, *, whole: bool, devices: Sequence[torch.device] = ()) -> RunRecord:
    record = RunRecord()
    with case.pipe(whole=whole, devices=devices) as pipe:
        before = prepare(case, pipe)
        loss = make_loss(case)
        for round in range(ROUNDS):
            torch.manual_seed(round)
            enter_round(pipe, round)
            try:
                facts = _call_pipe(case, pipe, round, loss)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is compared
                record.errors.append(error)
                return record
            record.rounds.append(facts | state_after(pipe, before, facts.pop("leaves")))
            update(pipe)
    return record


def _call_pipe(
    case: RandomPipe, pipe: GPipe, round: int, step_loss: Callable[[Any, Tensor], Tensor]
) -> dict[str, Any]:
    def value_of(round: int) -> tuple[Any, list[Tensor]]:
        return make_input(case, rebuilt(case.value(round), lambda tensor: tensor.to(pipe.devices[0])))

    value, leaves = value_of(round)
    target = case.target(round).to(pipe.output_device)
    facts: dict[str, Any] = {"leaves": leaves}
    if case.call == "step":
        with caller_modes(case):
            loss, output = pipe.step(
                value,
                target,
                step_loss,
                key=round,
                return_output=True,
                reduction="sum" if case.loss == "sum" else "mean",
            )
        return facts | {"loss": loss, "output": output}
    with caller_modes(case):
        output = pipe(value)
        if case.call == "two_forwards":
            more, more_leaves = value_of(round + 100)
            second = pipe(more)
            leaves += more_leaves
    facts["output"] = detached(output)
    if case.call == "forward":
        return facts
    loss = loss_of(output, target)
    if case.call == "backward":
        loss.backward()
    elif case.call == "backward_twice":
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        loss.backward()
        loss_of(second, target).backward()
        facts["second output"] = detached(second)
    return facts | {"loss": loss.detach()}


@dataclass
class PlainForward:
    """The forward pass of one mini-batch through the plain sequence."""

    sizes: list[int]
    inputs: list[Any]
    outputs: list[Any]

    @property
    def output(self) -> Any:
        """Joined, as a leaf that receives the gradient of the loss."""
        columns = [torch.cat(column) if len(column) > 1 else column[0] for column in self._columns()]
        needed = [any(tensor.requires_grad for tensor in column) for column in self._columns()]
        leaves = iter(
            [leaf.detach().requires_grad_(need) for leaf, need in zip(columns, needed, strict=True)]
        )
        return rebuilt(self.outputs[0], lambda _: next(leaves))

    def _columns(self) -> list[tuple[Tensor, ...]]:
        return list(zip(*(tensors_in(output) for output in self.outputs), strict=True))

    def backward(self, joined: Sequence[Tensor | None], *, keep: bool = False) -> None:
        """From the gradients of the joined output, micro-batch by micro-batch."""
        shares = [None if grad is None else grad.split(self.sizes) for grad in joined]
        for index, piece in enumerate(self.outputs):
            pairs = [
                (tensor, share[index])
                for tensor, share in zip(tensors_in(piece), shares, strict=True)
                if share is not None and tensor.requires_grad
            ]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)), retain_graph=keep)

    def input_gradients(self) -> list[Tensor | None]:
        columns = zip(*(tensors_in(piece) for piece in self.inputs), strict=True)
        return [
            torch.cat([leaf.grad for leaf in column])
            if all(leaf.grad is not None for leaf in column)
            else None
            for column in columns
        ]


class PlainRun:
    """The plain sequence, run with plain autograd."""

    def __init__(self, case: RandomPipe) -> None:
        self.case = case
        self.model = case.model()
        self.loss = make_loss(case)
        self.record = RunRecord()

    def run(self) -> RunRecord:
        before = prepare(self.case, self.model)
        for round in range(ROUNDS):
            enter_round(self.model, round)
            facts = self._step(round) if self.case.call == "step" else self._call(round)
            if self.record.errors:
                break
            leaves = facts.pop("leaves")
            self.record.rounds.append(facts | state_after(self.model, before, leaves))
            update(self.model)
        return self.record

    def _pieces(self, value: Any) -> tuple[list[int], list[Any]]:
        count = max(1, min(self.case.rows, self.case.chunks))
        small, larger = divmod(self.case.rows, count)
        sizes = [small + (index < larger) for index in range(count)]
        columns = [
            # The bits of a result depend on where a tensor begins, so a copy of the rows begins where they do.
            # `data` has a version counter of its own, as if nothing else shared its memory.
            [
                piece.data.requires_grad_(tensor.requires_grad)
                for piece in tensor.detach().clone().split(sizes)
            ]
            for tensor in tensors_in(value)
        ]
        rows = [iter(row) for row in zip(*columns, strict=True)]
        return sizes, [rebuilt(value, lambda _, row=row: next(row)) for row in rows]

    def _run(self, piece: Any) -> Any:
        with caller_modes(self.case, cache=False), use_skip_tracker(DictionarySkipTracker()):
            return self.model(piece)

    def _forward(self, value: Any) -> PlainForward | None:
        sizes, pieces = self._pieces(value)
        outputs = []
        for piece in pieces:
            with self._recording_errors():
                outputs.append(self._run(piece))
        return None if self.record.errors else PlainForward(sizes, pieces, outputs)

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
            self.record.errors.append(error)

    def _step(self, round: int) -> dict[str, Any]:
        value, leaves = make_input(self.case, self.case.value(round))
        sizes, pieces = self._pieces(value)
        losses, outputs = [], []
        for piece, target in zip(pieces, self.case.target(round).split(sizes), strict=True):
            with self._recording_errors():
                output = self._run(piece)
                outputs.append(output)
                with caller_modes(self.case, cache=False):
                    weight = 1 if self.case.loss == "sum" else len(target) / self.case.rows
                    loss = self.loss(output, target) * weight
                losses.append(loss.detach())
                if loss.requires_grad:
                    loss.backward()
        if self.record.errors:
            return {}
        forward = PlainForward(sizes, pieces, outputs)
        self._backward_to_input(value, leaves, forward)
        return {"leaves": leaves, "loss": torch.stack(losses).sum(), "output": detached(forward.output)}

    def _call(self, round: int) -> dict[str, Any]:
        value, leaves = make_input(self.case, self.case.value(round))
        forwards, values = [self._forward(value)], [(value, leaves)]
        if self.case.call == "two_forwards":
            values.append(make_input(self.case, self.case.value(round + 100)))
            forwards.append(self._forward(values[1][0]))
        if self.record.errors:
            return {}
        facts: dict[str, Any] = {"leaves": [leaf for _, some in values for leaf in some]}
        facts["output"] = detached(forwards[0].output)
        if len(forwards) > 1:
            facts["second output"] = detached(forwards[1].output)
        if self.case.call == "forward":
            return facts
        for (each, some), forward in zip(values, forwards, strict=True):
            with self._recording_errors():
                facts.setdefault("loss", self._backward(each, some, forward, round))
        return facts

    def _backward(self, value: Any, leaves: list[Tensor], forward: PlainForward, round: int) -> Tensor:
        output = forward.output
        loss = loss_of(output, self.case.target(round))
        # Not `.grad`: it would get the strides of the output, which the gradient itself need not have.
        wanted = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
        if not wanted:
            loss.backward()
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        joined = [next(found) if leaf.requires_grad else None for leaf in tensors_in(output)]
        if self.case.call == "backward_twice":
            forward.backward(joined, keep=True)
            self._backward_to_input(value, leaves, forward, keep=True)
        forward.backward(joined)
        self._backward_to_input(value, leaves, forward)
        return loss.detach()

    def _backward_to_input(
        self, value: Any, leaves: list[Tensor], forward: PlainForward, *, keep: bool = False
    ) -> None:
        """Pass the input gradients of the micro-batches on to the input and to what it was computed from."""
        if not leaves:
            return
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors_in(value), forward.input_gradients(), strict=True)
            if gradient is not None
        ]
        for piece in forward.inputs:
            for leaf in tensors_in(piece):
                leaf.grad = None
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)), retain_graph=keep)
