"""The metrics of a run: those of its loss, as sums that do not depend on how samples are divided into batches.

A loss of your own has a method `metrics` that returns means, as is usual. The losses of gpipe
have a method `measure` that returns sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import Measure, measure_of
from gpipe_cli.pipeline.loss import row_weights

RESERVED = (
    *("step", "epoch", "split", "loss", "loss_mean", "loss_min", "loss_max", "lr"),
    *("samples_per_second", "seconds", "grad_norm"),
)
"""Columns of metrics.jsonl that are no metrics of a loss."""


@runtime_checkable
class LossWithMetrics(Protocol):
    def __call__(self, output: Any, target: Tensor, /) -> Tensor: ...
    def metrics(self, output: Any, target: Tensor, /) -> Mapping[str, Any]:
        """By name, the mean over the given samples, or a tensor with the value of each sample.

        If the loss has `row_weights`, the mean over what it counts.
        """


def metrics_of(loss: object) -> Measure:
    """The function that measures outputs, for an engine: it returns sums over what the loss is a mean of."""
    return partial(_sums, loss) if isinstance(loss, LossWithMetrics) else measure_of(loss)


def _sums(loss: LossWithMetrics, output: Any, target: Tensor) -> dict[str, float]:
    weights = row_weights(loss, target, len(target))
    metrics = loss.metrics(output, target)
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{_name(loss)}: must return a dict of names and values, not a {type(metrics).__name__}"
        )
    if taken := [name for name in metrics if name in RESERVED]:
        raise ConfigError(
            f"{_name(loss)}: '{taken[0]}' is the name of another column of metrics.jsonl; choose another"
        )
    return {str(name): _sum(loss, name, value, weights) for name, value in metrics.items()}


def _sum(loss: LossWithMetrics, name: Any, value: Any, weights: Tensor) -> float:
    total = float(weights.sum())
    if total == 0:  # the mean of nothing may be nan
        return 0.0
    values = (
        torch.as_tensor(value, dtype=torch.float64).detach()
        if isinstance(value, int | float | Tensor)
        else None
    )
    if values is not None and values.dim() == 0:
        return float(values) * total
    if values is not None and values.shape == weights.shape:
        return float((values * weights.to(values)).sum())
    given = f"a tensor of shape {list(values.shape)}" if values is not None else f"a {type(value).__name__}"
    raise ConfigError(
        f"{_name(loss)}: '{name}' must be a mean over the samples or a value for each of {len(weights)}, not {given}"
    )


def _name(loss: object) -> str:
    return f"loss._target_={type(loss).__module__}.{type(loss).__qualname__}.metrics"
