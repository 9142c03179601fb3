"""AmoebaNet-D (Real et al., 2019) in the sizes of the GPipe paper: (num_layers, num_filters).

A layer is a cell. A cell reads the outputs of the two cells before it, so layers pass on a pair of tensors: the output
of the last cell and that of the one before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_whole_number

States = tuple[Tensor, Tensor]
"""The output of the last cell, and that of the one before it."""
MakeOperation = Callable[[int, int], nn.Module]
"""Takes channels and stride; no operation changes the number of channels."""


def build(
    num_classes: int = 10,
    num_layers: int = 3,
    num_filters: int = 64,
    input_shape: tuple[int, ...] = (3, 32, 32),
) -> nn.Sequential:
    """Return `num_layers` normal cells in three groups with reductions between them.

    num_filters: channels of a state after the two reductions of the stem, before the first normal cell.
    """
    check_whole_number("model.num_classes", num_classes, least=1)
    check_whole_number("model.num_layers", num_layers, least=3)
    check_whole_number("model.num_filters", num_filters, least=8)
    if len(input_shape) != 3:
        raise ConfigError(f"model: amoebanetd takes images, and the data has the shape {list(input_shape)}")
    if num_layers % 3:
        raise ConfigError(
            f"model.num_layers={num_layers}: must be a multiple of 3, for three groups of cells"
        )
    if num_filters % 8:
        raise ConfigError(
            f"model.num_filters={num_filters}: must be a multiple of 8, because the first cell has an eighth of it"
        )
    channels = num_filters // 4
    cells = _CellBuilder(channels)
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(input_shape[0], channels))
    layers["stem_reduction1"] = cells.reduction()
    layers["stem_reduction2"] = cells.reduction()
    for group in (1, 2, 3):
        if group > 1:
            layers[f"reduction{group - 1}"] = cells.reduction()
        for number in range(1, num_layers // 3 + 1):
            layers[f"cell{group}_{number}"] = cells.normal()
    layers["head"] = ClassifierHead(cells.last, num_classes)
    return nn.Sequential(layers)


def _stem(input_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(input_channels, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
    )


@final
class ClassifierHead(nn.Module):
    """Scores classes from the mean of each channel of the last cell."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, states: States) -> Tensor:
        scores: Tensor = self.classifier(states[0].mean((2, 3)))
        return scores


def _activated(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int]) -> nn.Sequential:
    """Return ReLU, convolution and batch norm, in this order."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _pointwise(inputs: int, outputs: int) -> nn.Sequential:
    return _activated(inputs, outputs, (1, 1), (1, 1))


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _activated(channels, channels, (1, 1), (stride, stride))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    """Through a bottleneck of a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        _pointwise(channels, narrow),
        _activated(narrow, narrow, (3, 3), (stride, stride)),
        _pointwise(narrow, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Through a bottleneck of a quarter of the channels, along one axis and then the other."""
    narrow = channels // 4
    return nn.Sequential(
        _pointwise(channels, narrow),
        _activated(narrow, narrow, (1, 7), (1, stride)),
        _activated(narrow, narrow, (7, 1), (stride, 1)),
        _pointwise(narrow, channels),
    )


def _max_pool_2x2(channels: int, stride: int) -> nn.Module:
    # Rounds up, as the padding of the other operations does, so that images may have odd sides.
    return nn.MaxPool2d(2, stride=stride, ceil_mode=True)


def _max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride=stride, padding=1)


def _avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)


def _identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


@final
class FactorizedReduction(nn.Module):
    """Halves the size: half of the channels read the first pixel of each 2x2 block, the other half the last."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.last = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, input: Tensor) -> Tensor:
        input = input.relu()
        shifted = nn.functional.pad(input, (0, 1, 0, 1))[:, :, 1:, 1:]
        output: Tensor = self.norm(torch.cat([self.first(input), self.last(shifted)], dim=1))
        return output


@final
@dataclass(frozen=True)
class Operation:
    state: int
    """The index of the state it is applied to."""
    make: MakeOperation


@final
@dataclass(frozen=True)
class Genotype:
    pairs: tuple[tuple[Operation, Operation], ...]
    """Each pair adds a state, the sum of two operations; states 0 and 1 come from the two cells before."""
    output: tuple[int, ...]
    """The states that are concatenated to the output."""


NORMAL = Genotype(
    pairs=(
        (Operation(1, _conv_1x1), Operation(1, _max_pool_3x3)),
        (Operation(1, _identity), Operation(0, _conv_1x7_7x1)),
        (Operation(0, _conv_1x1), Operation(0, _conv_1x7_7x1)),
        (Operation(2, _max_pool_3x3), Operation(2, _identity)),
        (Operation(1, _avg_pool_3x3), Operation(5, _conv_1x1)),
    ),
    output=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    pairs=(
        (Operation(0, _max_pool_2x2), Operation(0, _max_pool_3x3)),
        (Operation(2, _identity), Operation(1, _conv_3x3)),
        (Operation(2, _conv_1x7_7x1), Operation(2, _max_pool_3x3)),
        (Operation(3, _identity), Operation(1, _max_pool_2x2)),
        (Operation(2, _avg_pool_3x3), Operation(3, _conv_1x1)),
    ),
    output=(4, 5, 6),
)


@final
class Cell(nn.Module):
    """Returns its output together with its input, which the cell after the next reads."""

    def __init__(
        self, last: int, before: int, channels: int, genotype: Genotype, *, stride: int, after_reduction: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.last = _pointwise(last, channels)
        self.before: nn.Module = nn.Identity()
        if after_reduction:
            self.before = FactorizedReduction(before, channels)
        elif before != channels:
            self.before = _pointwise(before, channels)
        self.operations = nn.ModuleList(
            operation.make(channels, stride if operation.state < 2 else 1)
            for pair in genotype.pairs
            for operation in pair
        )

    def forward(self, input: Tensor | States) -> States:
        last, before = (input, input) if isinstance(input, Tensor) else input
        states = [self.last(last), self.before(before)]
        operations = iter(self.operations)
        for left, right in self.genotype.pairs:
            states.append(next(operations)(states[left.state]) + next(operations)(states[right.state]))
        return torch.cat([states[index] for index in self.genotype.output], dim=1), last


@final
class _CellBuilder:
    """Builds cells in order; each needs the numbers of channels of the two cells before it."""

    def __init__(self, channels: int) -> None:
        self._channels = self.last = self._before = channels
        self._after_reduction = False

    def normal(self) -> Cell:
        return self._next(NORMAL, stride=1)

    def reduction(self) -> Cell:
        self._channels *= 2
        return self._next(REDUCTION, stride=2)

    def _next(self, genotype: Genotype, stride: int) -> Cell:
        cell = Cell(
            self.last,
            self._before,
            self._channels,
            genotype,
            stride=stride,
            after_reduction=self._after_reduction,
        )
        self._before, self.last = self.last, self._channels * len(genotype.output)
        self._after_reduction = stride > 1
        return cell
