"""Examples of your own loss, metric, optimizer, learning-rate schedule and logger; docs/how-to/your-own-parts.md and
docs/how-to/loggers.md train with them.

gpipe train model=mlp loss=myparts:FocalLoss
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


class FocalLoss:
    """Cross entropy that pays less attention to samples which are already classified well."""

    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        nats = cross_entropy(output, target, reduction="none")
        # The mean over the samples: gpipe weights the loss of each micro-batch by its samples.
        return ((1 - torch.exp(-nats)) ** self.gamma * nats).mean()

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        predicted = output.argmax(1)
        return {
            "top1": (predicted == target).float().mean(),  # the mean over the samples ...
            "distance_error": (predicted - target).abs(),  # ... or a value for each of them
        }


class Lion(torch.optim.Optimizer):
    """Updates each parameter by the sign of a momentum."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (fast, slow), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * decay)
                parameter.sub_(lr * torch.sign(fast * momentum + (1 - fast) * parameter.grad))
                momentum.lerp_(parameter.grad, 1 - slow)


class Triangle:
    """A learning rate that rises to the middle of the run and falls again."""

    def __init__(self, lowest: float = 0.01) -> None:
        self.lowest = lowest

    def factor(self, step: int, total: int) -> float:
        middle = max(1, total - 1) / 2
        return max(self.lowest, 1 - abs(step - middle) / middle)


class CsvLogger:
    """Writes every value to scores.csv in the run directory."""

    def open(self, run: Any) -> None:
        self._file = (run.directory / "scores.csv").open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.writerows((step, name, value) for name, value in values.items())

    def close(self) -> None:
        self._file.close()
