"""Small models with everything that a partition's boundary must handle, run on accelerators and on a reference device.

The reference runs the same micro-batches one after another on one device: the CPU for simulated devices, whose kernels
are the CPU's, and the first accelerator for real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.skip import pop, skippable, stash
from tests.accelerator import simulator

WIDTH = 8
ROWS = 12
CHUNKS = 4
STEPS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
CHECKPOINTS = ("never", "except_last", "always")


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("skip", input * 2)
        return input


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Any:
        skip = yield pop("skip")
        return input + skip


class Split(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input * 2, input.detach()


class ToBoth(nn.Module):
    """Uses one tensor of a pair for the other, and the current device for a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        return self.linear(first) + second, second + torch.ones(WIDTH, device=second.device.type)


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.unflatten(-1, (2, WIDTH // 2)).repeat(1, 1, 2)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].sum(1)


def linears(between: Callable[[], nn.Module]) -> list[nn.Module]:
    return [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), between())]


def tied() -> list[nn.Module]:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    layers[4].weight = layers[0].weight
    layers[7].weight = layers[0].weight
    return layers


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "mlp": lambda: linears(nn.Tanh),
    "in-place": lambda: linears(lambda: nn.ReLU(inplace=True)),
    "skips": lambda: [nn.Linear(WIDTH, WIDTH), Stash(), *linears(nn.Tanh)[:5], Pop()],
    "tuples": lambda: [nn.Linear(WIDTH, WIDTH), Split(), *[ToBoth() for _ in range(5)], Join()],
    "dropout": lambda: linears(lambda: nn.Dropout(0.3)),
    "batch norm": lambda: linears(lambda: nn.BatchNorm1d(WIDTH)),
    "deferred batch norm": lambda: linears(lambda: nn.BatchNorm1d(WIDTH)),
    "tied": tied,
    "attention": lambda: linears(lambda: Attention(0.2)),
}


@dataclass(frozen=True)
class Case:
    model: str
    devices: int
    schedule: str
    checkpoint: str
    step: bool
    """Or forward and `loss.backward()`."""

    def __str__(self) -> str:
        call = "step" if self.step else "forward and backward"
        return f"{self.model}, {self.devices} devices, {self.schedule}, checkpoint {self.checkpoint}, {call}"


def all_cases() -> list[Case]:
    return [Case(*facts) for facts in product(MODELS, (2, 4), SCHEDULES, CHECKPOINTS, (True, False))]


def selected_cases() -> Iterator[Case]:
    """Every model with every schedule, and each of the other choices in turn."""
    for number, (model, schedule) in enumerate(product(MODELS, SCHEDULES)):
        turn = number + number // len(SCHEDULES)
        yield Case(model, (2, 4)[turn % 2], schedule, CHECKPOINTS[turn % 3], turn // 2 % 2 == 0)


def model_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[case.model]())


def run(case: Case, accelerators: Sequence[torch.device]) -> dict[str, Tensor]:
    """Losses, gradients and buffers of a pipe, on the CPU."""
    partitions = 2 * case.devices if case.schedule == "interleaved" else case.devices
    pipe = GPipe(
        model_of(case),
        [8 // partitions] * partitions,
        devices=[accelerators[index % len(accelerators)] for index in range(case.devices)],
        chunks=CHUNKS,
        schedule=case.schedule,
        checkpoint=case.checkpoint,
        deferred_batch_norm=case.model == "deferred batch norm",
        step_timeout=60,
    )
    with pipe:
        return results(pipe, pipe.devices[0], pipe.output_device, step=case.step)


def reference(case: Case, accelerators: Sequence[torch.device]) -> dict[str, Tensor]:
    device = accelerators[0] if simulator.loaded() is None else torch.device("cpu")
    deferred = case.model == "deferred batch norm"
    # One partition: autograd alone would run the backward of the last micro-batch first, and sum in that order.
    with GPipe(
        model_of(case), [8], devices=[device], chunks=CHUNKS, checkpoint="never", deferred_batch_norm=deferred
    ) as pipe:
        return results(pipe, device, device, step=case.step)


def results(pipe: Pipe, first: torch.device, last: torch.device, *, step: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    inputs = [torch.randn(ROWS, WIDTH).to(first).requires_grad_() for _ in range(STEPS)]
    targets = [torch.randn(ROWS, WIDTH).to(last) for _ in range(STEPS)]
    losses = []
    for number, (input, target) in enumerate(zip(inputs, targets, strict=True)):
        if step:
            losses.append(pipe.step(input, target, functional.mse_loss, key=number))
        else:
            torch.manual_seed(number)
            loss = functional.mse_loss(pipe(input), target)
            loss.backward()
            losses.append(loss.detach())
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    found = {
        **{f"loss {number}": loss for number, loss in enumerate(losses)},
        **{f"gradient of input {number}": input.grad for number, input in enumerate(inputs)},
        **{f"gradient of {name}": gradient for name, gradient in gradients.items() if gradient is not None},
        **dict(pipe.named_buffers()),
    }
    return {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def differences(case: Case, accelerators: Sequence[torch.device]) -> list[str]:
    """The names of what differs by a bit from the reference."""
    mine, theirs = run(case, accelerators), reference(case, accelerators)
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]
