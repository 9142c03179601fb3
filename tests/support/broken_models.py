"""Models that no pipe can run, each for a reason of its own; tests name them on the command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Naming(nn.Module):
    def forward(self, input: Tensor) -> dict[str, set[Tensor]]:
        return {"features": {input.flatten(1)}}


def returns_a_set(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.ReLU(), Naming(), nn.Linear(3072, num_classes))


class Net(nn.Module):
    def __init__(self, num_classes: int, gate: nn.Module) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 4, 3), gate
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(16, num_classes)

    def forward(self, input: Tensor) -> Any:
        return self.head(self.pool(self.gate(self.stem(input))).flatten(1))


def traceable(num_classes: int = 10) -> nn.Module:
    return Net(num_classes, nn.ReLU())


class Choosy(Net):
    def forward(self, input: Tensor) -> Any:
        value = self.stem(input)
        if value.sum() > 0:
            value = self.gate(value)
        return self.head(self.pool(value).flatten(1))


def looks_at_values(num_classes: int = 10) -> nn.Module:
    return Choosy(num_classes, nn.ReLU())


class RowCount(Net):
    def forward(self, input: Tensor) -> int:
        return int(super().forward(input).shape[0])


def returns_a_number(num_classes: int = 10) -> nn.Module:
    return RowCount(num_classes, nn.ReLU())


class Scatter(nn.Module):
    """torch has no deterministic kernel for `put_`, not even on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        return input.clone().put_(torch.tensor([0]), torch.ones(1))


def has_no_deterministic_kernel(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes), Scatter())


class TrainsOnly(Net):
    def forward(self, input: Tensor) -> Any:
        scores = super().forward(input)
        if not self.training:
            raise ValueError("trains only")
        return scores, scores.mean()


class WithLoss(Net):
    def forward(self, input: Tensor) -> Any:
        scores = super().forward(input)
        return scores, scores.mean()


def fails_in_evaluation(num_classes: int = 10) -> nn.Module:
    return TrainsOnly(num_classes, nn.ReLU())


def returns_its_loss(num_classes: int = 10) -> nn.Module:
    return WithLoss(num_classes, nn.ReLU())
