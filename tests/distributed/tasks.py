"""Small models that have what makes engines differ: batch norm, dropout, long skips, tied weights, odd borders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_cli.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from gpipe_cli.losses.dice import Dice
from gpipe_cli.models import gpt, resnet, unet
from gpipe_cli.pytree import ModelInput
from gpipe_cli.sequential.selection import freeze
from gpipe_cli.skip import pop, skippable, stash


@dataclass(frozen=True)
class Task:
    model: nn.Sequential
    input: ModelInput
    target: Tensor
    loss: Any


def perceptron(rows: int) -> Task:
    """In-place layers first in a partition, batch norm, dropout; one layer in two has no parameters."""
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Hardtanh(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return Task(model, torch.randn(rows, 2, 6), torch.randint(3, (rows,)), CrossEntropy())


def residual(rows: int) -> Task:
    model = resnet.build("resnet18", num_classes=4)
    return Task(model, torch.randn(rows, 3, 32, 32), torch.randint(4, (rows,)), CrossEntropy())


def long_skips(rows: int) -> Task:
    model = unet.build(3, 2, 4, dropout=0.2, num_classes=3, input_shape=(3, 17, 20))
    return Task(model, torch.randn(rows, 3, 17, 20), torch.randint(3, (rows, 17, 20)), Dice())


def tied(rows: int) -> Task:
    """A transformer of eight layers, the last of which uses the matrix of the first."""
    model = gpt.build(16, 6, 2, dropout=0.1, num_classes=11, input_shape=(9,))
    return Task(model, torch.randint(11, (rows, 9)), torch.randint(11, (rows, 9)), TokenCrossEntropy())


def tied_without_dropout(rows: int) -> Task:
    model = gpt.build(16, 2, 2, num_classes=11, input_shape=(9,))
    return Task(model, torch.randint(11, (rows, 9)), torch.randint(11, (rows, 9)), TokenCrossEntropy())


def tied_in_bfloat16(rows: int) -> Task:
    task = tied(rows)
    return replace(task, model=task.model.bfloat16())


@skippable(stash=["early", "nothing"])
class Fork(nn.Module):
    """A tuple with whole numbers and a mask, a transposed tensor, a skip, and a skip that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, input: Tensor) -> Any:
        yield stash("early", self.linear(input))
        yield stash("nothing", None)
        return input.unsqueeze(2).expand(-1, -1, 5).transpose(1, 2) * 2, input.argmax(1), input > 0


class Across(nn.Module):
    """Writes what it is given in place, hands the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        value, index, mask = given
        value += 1
        return self.linear(value).transpose(1, 2).transpose(1, 2) * 1, index, mask


@skippable(pop=["early", "nothing"])
class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Any:
        value, index, mask = given
        early = yield pop("early")
        nothing = yield pop("nothing")
        assert nothing is None and index.dtype == torch.int64 and mask.dtype == torch.bool
        return self.linear(value.mean(1) + early * mask) + index.unsqueeze(1)


def odd_borders(rows: int) -> Task:
    model = nn.Sequential(
        Fork(), Across(), Across(), Across(), Join(), nn.ReLU(), nn.Linear(7, 4), nn.Linear(4, 3)
    )
    return Task(model, torch.randn(rows, 6), torch.randint(3, (rows,)), CrossEntropy())


@skippable(stash=["mask", "lengths", "nobody", "nowhere"])
class Embed(nn.Module):
    """Takes keyword arguments; its skips are a mask, whole numbers, and two tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, given: dict[str, Tensor]) -> Any:
        value = self.embedding(given["input_ids"])
        mask = given["attention_mask"]
        yield stash("mask", mask.bool())
        yield stash("lengths", mask.sum(1))
        yield stash("nobody", mask[:, :0])
        yield stash("nowhere", value[:, :0])
        return value


@skippable(pop=["lengths"])
class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Any:
        lengths = yield pop("lengths")
        assert lengths.dtype == torch.int64 and not lengths.requires_grad
        return self.linear(value / lengths[:, None, None])


@skippable(pop=["mask", "nobody", "nowhere"])
class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 11)

    def forward(self, value: Tensor) -> Any:
        mask = yield pop("mask")
        nobody = yield pop("nobody")
        nowhere = yield pop("nowhere")
        assert mask.dtype == torch.bool and nobody.dtype == torch.int64
        assert nobody.shape == (len(value), 0) and nowhere.shape == (len(value), 0, 6)
        return self.linear(torch.cat([value.masked_fill(~mask.unsqueeze(-1), 0), nowhere], dim=1))


def keyword_arguments(rows: int) -> Task:
    """A dict of tokens and a mask, padded to a length that differs from batch to batch; padding is not scored."""
    linear = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    model = nn.Sequential(Embed(), *linear, Scale(), nn.ReLU(), nn.Linear(6, 6), Score())
    longest = 4 + rows % 5
    lengths = torch.randint(2, longest + 1, (rows, 1))
    lengths[-1] = longest
    mask = (torch.arange(longest) < lengths).long()
    tokens, target = torch.randint(11, (2, rows, longest)).unbind()
    input = {"input_ids": tokens * mask, "attention_mask": mask}
    return Task(model, input, target.where(mask.bool(), -100), TokenCrossEntropy())


class OwnCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.block, input, use_reentrant=False)


def own_checkpoints(rows: int) -> Task:
    model = nn.Sequential(nn.Linear(6, 6), OwnCheckpoint(), OwnCheckpoint(), nn.Linear(6, 3))
    return Task(model, torch.randn(rows, 6), torch.randint(3, (rows,)), CrossEntropy())


def frozen_start(rows: int) -> Task:
    """A first partition that trains nothing and a second one without parameters."""
    task = perceptron(rows)
    task.model[:4].requires_grad_(False)
    return task


def normed(rows: int) -> Task:
    """Batch norm and nothing drawn: replicas may be compared with one that has all samples."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(12, 3))
    return Task(model, torch.randn(rows, 2, 6), torch.randint(3, (rows,)), CrossEntropy())


def normed_rows(rows: int) -> Task:
    """Batch norms with one value per channel and row, which reject a single row."""
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return Task(model, torch.randn(rows, 6), torch.randint(3, (rows,)), CrossEntropy())


def frozen_norms(rows: int) -> Task:
    """A frozen batch norm below trained layers, with no backward, and one among them, with a gradient of its input."""
    task = normed(rows)
    freeze(task.model, ["0", "1", "4"])
    return task


def large_inputs(rows: int) -> Task:
    """The gradient of the first weight overflows in fp16 until the loss scale is small."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    return Task(model, 1000 * torch.randn(rows, 6), torch.randint(3, (rows,)), CrossEntropy())


class Do(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


def _laid_out(*layers: nn.Module, rows: int) -> Task:
    """The second partition of two begins after the second of these layers."""
    model = nn.Sequential(nn.Identity(), *layers, nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 19, 24))
    return Task(model, torch.randn(rows, 19, 24), torch.randint(3, (rows,)), CrossEntropy())


def _value(view: Callable[[Tensor], Tensor], layer: nn.Module, rows: int) -> Task:
    """A view crosses, and the bits of the layer behind it depend on its strides."""
    return _laid_out(nn.Linear(24, 24), Do(view), layer, rows=rows)


def _gradient(function: Callable[[Tensor], Tensor], rows: int) -> Task:
    """The gradient of the function crosses; torch sums that of the bias in the order of its memory."""
    return _laid_out(nn.Identity(), nn.Linear(24, 24), Do(function), rows=rows)


def transposed(rows: int) -> Task:
    return _value(lambda input: input.transpose(1, 2), nn.LazyLinear(5), rows)


def sliced(rows: int) -> Task:
    """It has gaps, and does not begin at an aligned address."""
    return _value(lambda input: input[:, 1:, 1:], nn.LazyLinear(5), rows)


def expanded(rows: int) -> Task:
    squared = Do(lambda input: input @ input.transpose(1, 2))
    return _value(lambda input: input[:, :1].expand(-1, 7, -1), squared, rows)


def transposed_gradient(rows: int) -> Task:
    return _gradient(lambda input: input.transpose(1, 2), rows)


def expanded_gradient(rows: int) -> Task:
    return _gradient(lambda input: input.sum(2), rows)


def channels_last(rows: int) -> Task:
    layers = [
        nn.Conv2d(5, 7, 3),
        nn.BatchNorm2d(7),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(7, 9, 3),
        nn.Tanh(),
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Conv2d(9, 3, 1), nn.Flatten(), nn.Identity())
    input = torch.randn(rows, 5, 13, 13).contiguous(memory_format=torch.channels_last)
    return Task(model.to(memory_format=torch.channels_last), input, torch.randint(3, (rows,)), CrossEntropy())


class Failing(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        # Without values nothing is wrong with it, so that its shape can be told.
        if self.training and type(input) is Tensor:
            raise ZeroDivisionError("no reason")
        return input * 2


def failing(rows: int) -> Task:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), Failing())
    return Task(model, torch.randn(rows, 6), torch.randint(3, (rows,)), CrossEntropy())


TASKS: dict[str, Callable[[int], Task]] = {
    task.__name__: task
    for task in (
        perceptron,
        residual,
        long_skips,
        tied,
        tied_without_dropout,
        tied_in_bfloat16,
        odd_borders,
        keyword_arguments,
        own_checkpoints,
        frozen_start,
        normed,
        normed_rows,
        frozen_norms,
        large_inputs,
        transposed,
        sliced,
        expanded,
        transposed_gradient,
        expanded_gradient,
        channels_last,
        failing,
    )
}


def make(name: str, rows: int) -> Task:
    """The same for everyone who asks."""
    torch.manual_seed(0)
    return TASKS[name](rows)
