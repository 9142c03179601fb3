"""Deferred batch norm: running statistics of the mini-batch, although the layer sees only micro-batches.

The layer normalizes each micro-batch by its own statistics. It merges their counts, means and squared deviations
(Chan's parallel update, which does not cancel at large means), and one commit per mini-batch updates the running
statistics. Micro-batches reach a layer in ascending order, so the bits do not depend on thread timing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.pipeline.context import is_recomputing
from gpipe_cli.sequential.selection import stays_in_eval_mode

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Replace each batch norm that tracks statistics, in place; return the module or its replacement.

    A frozen batch norm, which stays in eval mode, has no statistics to defer.
    Parameters and buffers are the same objects under the same names.
    """
    replacements: dict[nn.Module, DeferredBatchNorm] = {}  # a layer used at several places stays one layer
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        if _is_deferrable(layer):
            replacement = replacements.setdefault(layer, DeferredBatchNorm(layer))
            if layer is module:
                return replacement
            module.set_submodule(path, replacement)
    return module


@contextlib.contextmanager
def commit_or_discard(batch_norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """Run one mini-batch inside: commit the statistics at its end, or discard them if it raises."""
    try:
        yield
    except BaseException:
        for batch_norm in batch_norms:
            batch_norm.discard()
        raise
    for batch_norm in batch_norms:
        batch_norm.commit()


def deferred_batch_norms(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    return (layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm))


@final
@dataclass(frozen=True, slots=True)
class Moments:
    """Per channel: the number of values, their mean, and the sum of their squared deviations."""

    count: int
    mean: Tensor
    deviation: Tensor

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.deviation + other.deviation + apart.square() * (self.count * other.count / count),
        )


@final
class DeferredBatchNorm(nn.Module):
    """Replaces a BatchNorm1d, 2d or 3d. In evaluation mode it does the same."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, original: BatchNorm) -> None:
        super().__init__()
        self.num_features = original.num_features
        self.eps = original.eps
        self.momentum = original.momentum
        self.training = original.training
        self._dimensions = next(
            allowed for kind, allowed in _DIMENSIONS.items() if isinstance(original, kind)
        )
        self.register_parameter("weight", original.weight)
        self.register_parameter("bias", original.bias)
        for name, buffer in original.named_buffers():
            self.register_buffer(name, buffer)
        self.pending: Moments | None = None
        """The moments of the micro-batches since the last commit."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in self._dimensions:
            allowed = " or ".join(f"{dimensions}D" for dimensions in self._dimensions)
            raise ValueError(f"expected {allowed} input (got {input.dim()}D input)")
        if not self.training:
            return self._normalize(input, self.running_mean, self.running_var, training=False)
        # With a momentum of 1, torch stores the statistics of the micro-batch itself here: no second pass is needed.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = self._normalize(input, mean, variance, training=True)
        if not is_recomputing():
            self._remember(input.numel() // self.num_features, mean, variance)
        return output

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics by the micro-batches since the last commit, if any."""
        if self.pending is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        variance = self.pending.deviation / (self.pending.count - 1)
        self.running_mean.mul_(1 - share).add_(share * self.pending.mean)
        self.running_var.mul_(1 - share).add_(share * variance)
        self.pending = None

    def discard(self) -> None:
        """Forget the micro-batches since the last commit."""
        self.pending = None

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={affine}"

    def _normalize(self, input: Tensor, mean: Tensor, variance: Tensor, *, training: bool) -> Tensor:
        return functional.batch_norm(
            input, mean, variance, self.weight, self.bias, training, momentum=1.0, eps=self.eps
        )

    @torch.no_grad()
    def _remember(self, count: int, mean: Tensor, variance: Tensor) -> None:
        precise = torch.promote_types(mean.dtype, torch.float32)
        moments = Moments(count, mean.to(precise), variance.to(precise) * (count - 1))
        self.pending = moments if self.pending is None else self.pending.merge(moments)


def _is_deferrable(layer: nn.Module) -> TypeGuard[BatchNorm]:
    if not isinstance(layer, BatchNorm) or not layer.track_running_stats or stays_in_eval_mode(layer):
        return False
    if type(layer).forward is not nn.BatchNorm1d.forward:  # all three kinds share it
        raise TypeError(
            f"{type(layer).__name__} has a forward of its own, so its statistics cannot be deferred; "
            "use deferred_batch_norm=False"
        )
    return True
