"""From gradients to new parameters: unscale, clip, judge, step.

Norms are taken per parameter and reduced in the order of the model's own names, so the result does not depend
on how the model was partitioned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.collectives import Collectives, SingleProcess
from gpipe_cli.errors import NumericError

NO_GRADIENT: Final = -1.0
"""In the place of a norm, which is never negative."""
MOST_SKIPS_IN_A_ROW = 20
"""The scale halves each time: from torch's first one, 65,536, to 1/16, where overflow is no matter of scale."""


@dataclass(frozen=True)
class UpdateFacts:
    grad_norm: float | None = None
    skipped: bool = False


@final
class Update:
    """Owns the optimizer and, for fp16, the loss scale."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        clip_grad_norm: float | None,
        scale_loss: bool,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._collectives = collectives or SingleProcess()
        self._parameters = parameters
        self._clip = clip_grad_norm
        self._skips = Skips()
        self.scaler = torch.amp.GradScaler(device.type, enabled=scale_loss)
        # It makes its scale when it sees the first loss, which a process without the last layer never does.
        self.scaler.scale(torch.zeros((), device=device))

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad(set_to_none=True)

    def apply(self, loss: float, lr: float) -> UpdateFacts:
        """Update every parameter, or leave the step out where scaled gradients overflowed."""
        require_finite_loss(loss)
        set_rate(self.optimizer, lr)
        self.scaler.unscale_(self.optimizer)
        self._collectives.agree_on_overflow(self.scaler, self.optimizer)
        norm = self._clip_gradients()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < before
        self._skips.count(skipped, self.scaler)
        return UpdateFacts(grad_norm=norm, skipped=skipped)

    def _clip_gradients(self) -> float | None:
        """The norm of the gradients before they were clipped; None where fp16 overflowed."""
        gradients = [one.grad for one in self._parameters]
        norm = global_norm(self._collectives.norms(norms_of(gradients)))
        if not is_finite(norm, self.scaler):
            return None
        if self._clip is not None:
            factor = clip_factor(norm, self._clip)
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return norm


@final
class Skips:
    """Counts steps left out in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def count(self, skipped: bool, scaler: torch.amp.GradScaler) -> None:
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == MOST_SKIPS_IN_A_ROW:
            raise NumericError(
                f"the gradients overflowed in {MOST_SKIPS_IN_A_ROW} steps in a row, down to a loss scale of "
                f"{scaler.get_scale():g}; try a smaller optimizer.lr, precision=bf16 or precision=fp32"
            )


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def require_finite_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise NumericError(
            f"the loss is {loss}; try a smaller optimizer.lr, clip_grad_norm=1 or precision=fp32"
        )


def is_finite(norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Whether gradients can be used; that they overflowed in fp16 is the scaler's to handle, else it is an error."""
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise NumericError(
            f"the gradient norm is {norm}; try a smaller optimizer.lr, clip_grad_norm=1 or precision=fp32"
        )
    return math.isfinite(norm)


def clip_factor(norm: float, largest: float) -> float:
    return min(1.0, largest / (norm + 1e-6))


def norm_of(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach())
    return norm


def norms_of(gradients: Sequence[Tensor | None]) -> Tensor:
    """The 2-norm of each, in double precision on the CPU."""
    return collected([None if one is None else norm_of(one) for one in gradients])


def collected(found: Sequence[Tensor | None]) -> Tensor:
    """Norms in double precision on the CPU."""
    norms = torch.full((len(found),), NO_GRADIENT, dtype=torch.float64)
    present = [place for place, one in enumerate(found) if one is not None]
    if not present:
        return norms
    # One transfer per run of equal devices: each would wait for its device.
    runs = [
        torch.stack(list(run)).to("cpu", torch.float64)
        for _, run in groupby(
            (one for one in found if one is not None), key=lambda norm: (norm.device, norm.dtype)
        )
    ]
    norms[present] = torch.cat(runs)
    return norms


def global_norm(norms: Tensor) -> float:
    """The 2-norm of all gradients together: the norm of their norms, in the order given."""
    return float(torch.linalg.vector_norm(norms[norms != NO_GRADIENT]))
