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


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()

    def forward(self, input: Tensor) -> Any:
        return input if input.sum() > 0 else self.inner(input)


class Net(nn.Module):
    def __init__(self, num_classes: int, gate: nn.Module) -> None:
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 4, 3), gate
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(16, num_classes)

    def forward(self, input: Tensor) -> Any:
        return self.head(self.pool(self.gate(self.stem(input))).flatten(1))


def traceable(num_classes: int = 10) -> nn.Module:
    return Net(num_classes, nn.ReLU())


def looks_at_values(num_classes: int = 10) -> nn.Module:
    return Net(num_classes, Gate())


class Stateful(nn.Module):
    """The state of the first goes to the second as a tuple, so it crosses every border."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, num_classes, batch_first=True)
        self.two = nn.LSTM(num_classes, num_classes, batch_first=True)

    def forward(self, input: Tensor) -> Any:
        value, state = self.lstm(input.flatten(1, 2))
        return self.two(value, state)[0][:, -1]


def hands_over_a_tuple(num_classes: int = 10) -> nn.Module:
    return Stateful(num_classes)


class Listing(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, num_classes)

    def forward(self, input: Tensor) -> list[Tensor]:
        return [self.second(self.first(input)).mean((1, 2))]


def returns_a_list(num_classes: int = 10) -> nn.Module:
    return Listing(num_classes)


class Scatter(nn.Module):
    """torch has no deterministic kernel for `put_`, not even on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        return input.clone().put_(torch.tensor([0]), torch.ones(1))


def has_no_deterministic_kernel(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes), Scatter())
