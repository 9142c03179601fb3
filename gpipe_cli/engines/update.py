"""From gradients to new parameters: unscale, check, clip, step.

Norms are taken per parameter and reduced in the order of the model's own names, so the result does not depend
on how the model was partitioned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.copies import start_copy
from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.engines.collectives import Collectives, SingleProcess
from gpipe_cli.errors import NumericError
from gpipe_cli.offload.slices import Part, Slice
from gpipe_cli.torch_internals.optimizers import foreach_norm

NO_GRADIENT: Final = -1.0
"""Takes the place of a norm, which is never negative."""
MAX_CONSECUTIVE_SKIPS = 20
"""The scale halves each time: from torch's first scale, 65,536, to 1/16, where the scale is not what overflows."""


@final
@dataclass(frozen=True)
class UpdateFacts:
    grad_norm: float | None = None
    skipped: bool = False


@final
class LossScale:
    """The GradScaler of fp16 training, and how many updates in a row overflowed."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.scaler = torch.amp.GradScaler(device.type, enabled=enabled)
        self._consecutive_skips = 0

    def finish_step(self, grad_norm: float | None) -> UpdateFacts:
        """Adapt the scale after an update that was made or skipped; raise if too many in a row were skipped."""
        before = self.scaler.get_scale()
        self.scaler.update()
        # The scaler tells of a skipped update only by lowering its scale.
        skipped = self.scaler.get_scale() < before
        self._consecutive_skips = self._consecutive_skips + 1 if skipped else 0
        if self._consecutive_skips == MAX_CONSECUTIVE_SKIPS:
            raise NumericError(
                f"the gradients overflowed in {MAX_CONSECUTIVE_SKIPS} steps in a row, down to a loss scale of "
                f"{self.scaler.get_scale():g}; try a smaller optimizer.lr, precision=bf16 or precision=fp32"
            )
        return UpdateFacts(grad_norm, skipped)


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
        of_others: Sequence[nn.Parameter] = (),
    ) -> None:
        """parameters: all whose gradients count, in the order of the model's names.
        of_others: those among them that optimizers of other processes update.
        """
        self.optimizer = optimizer
        self._unscaled = [optimizer]
        if of_others:
            # The scaler takes gradients from an optimizer; this one updates nothing and has no state.
            self._unscaled.append(torch.optim.SGD(of_others))
        self._collectives = collectives or SingleProcess()
        self._parameters = parameters
        self._clip = clip_grad_norm
        self._loss_scale = LossScale(device, enabled=scale_loss)
        self.scaler = self._loss_scale.scaler
        # The scaler creates its scale when it sees the first loss, which a process without the last layer never does.
        self.scaler.scale(torch.zeros((), device=device))

    def begin(self) -> None:
        """Drop the gradients of the previous step."""
        for parameter in self._parameters:
            parameter.grad = None

    def norms(self) -> Tensor:
        """Undo the loss scale, and take the norms of the gradients of this process."""
        # Before norms are taken: clipping compares the true norm with its limit.
        for optimizer in self._unscaled:
            self.scaler.unscale_(optimizer)
        # scaler.step decides by what unscale_ recorded. If one rank skipped the update and another did not, their
        # parameters would never match again.
        self._collectives.agree_on_overflow(self.scaler)
        return norms_of([parameter.grad for parameter in self._parameters])

    def apply(self, loss: float, norms: Tensor, lr: float) -> UpdateFacts:
        """Update every parameter, or skip the update if scaled gradients overflowed; norms: of all processes."""
        # Before the gradients, which are not finite either then: the loss is the more telling message.
        require_finite_loss(loss)
        set_lr(self.optimizer, lr)
        # Also without clipping: the norm is the check for finite gradients.
        norm = global_norm(norms)
        finite = is_finite(norm, self.scaler)
        if finite and self._clip is not None:
            _scale(self._parameters, clip_factor(norm, self._clip))
        # For fp16 this skips the update after an overflow; otherwise it is optimizer.step.
        self.scaler.step(self.optimizer)
        return self._loss_scale.finish_step(norm if finite else None)


SliceTour = Callable[[Sequence[Part], Collection[Part]], Iterator[Slice]]
"""Brings in all slices, one after another: which parts of each, and which of them the caller changes."""


@final
@dataclass
class ResidentParameters:
    """Trained parameters that stay on the device because several slices share them, with their optimizer."""

    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None


@final
class SliceUpdate:
    """Updates an offloaded model slice by slice, each as soon as its backward is done; each slice has an optimizer.

    Clipping and fp16 need the gradients of all slices first. Then each slice stores its gradients, and a second tour
    over all slices updates them. The order of norms is that of `Update`, so both compute the same numbers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        resident: ResidentParameters,
        tour: SliceTour,
        *,
        clip_grad_norm: float | None,
        scale_loss: bool,
        device: torch.device,
    ) -> None:
        self._loss_scale = LossScale(device, enabled=scale_loss)
        self.scaler = self._loss_scale.scaler
        self.lr = 0.0
        """Of the step that comes next."""
        self._parameters = parameters
        self._resident = resident
        self._tour = tour
        self._clip = clip_grad_norm
        self._device = device
        self._norms: dict[nn.Parameter, float] = {}
        self._usable = True
        self._failed = False

    @property
    def _is_immediate(self) -> bool:
        return self._clip is None and not self.scaler.is_enabled()

    @property
    def needs(self) -> Collection[Part]:
        """The parts of a slice besides its weights that `completed` works on."""
        return (Part.STATE,) if self._is_immediate else ()

    def begin(self) -> None:
        """Forget the previous step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._norms.clear()
        self._usable = True

    def completed(self, slice: Slice) -> Collection[Part]:
        """Called on the worker thread when the gradients of a slice are complete; the parts that have changed."""
        if self._failed:  # the step only runs again to find where its numbers stopped being finite
            return ()
        # The worker has re-entered the caller's autocast, which must not affect an optimizer that multiplies matrices.
        with torch.autocast(self._device.type, enabled=False):
            self._record_norms(slice)
            if self._usable:
                return _step(slice, self.lr) if self._is_immediate else (Part.GRADIENTS,)
            if self.scaler.is_enabled():  # fp16 overflowed, which is normal
                _drop_gradients(slice)
            return ()  # otherwise the gradients stay, so that the first nonfinite one can be named

    def norms(self) -> Tensor:
        """None: slices take theirs as soon as they are completed."""
        return torch.empty(0, dtype=torch.float64)

    def apply(self, loss: float, norms: Tensor, lr: float) -> UpdateFacts:
        """Do what has to wait until every slice is completed."""
        try:
            require_finite_loss(loss)
            self._record_norms(self._resident)
            recorded = [self._norms.get(parameter, NO_GRADIENT) for parameter in self._parameters]
            norm = global_norm(torch.tensor(recorded, dtype=torch.float64))
            finite = is_finite(norm, self.scaler)
        except NumericError:
            self._failed = True
            raise
        if self._usable:
            factor = clip_factor(norm, self._clip) if finite and self._clip is not None else 1.0
            self._update_remaining(factor, lr)
        return self._loss_scale.finish_step(norm if finite else None)

    def _record_norms(self, group: Slice | ResidentParameters) -> None:
        """Undo the loss scale and record the norms."""
        if group.optimizer is not None:
            # unscale_ also records overflows for each optimizer; scaler.update adapts the scale to all of them.
            self.scaler.unscale_(group.optimizer)
        gradients = {parameter: parameter.grad for parameter in group.trained if parameter.grad is not None}
        # The one wait of the host in the update of a slice: it must know that the gradients are finite.
        norms = dict(zip(gradients, norms_of(list(gradients.values())).tolist(), strict=True))
        self._norms |= norms
        # The norm of finite numbers may still overflow, which is no reason to lower the loss scale.
        self._usable = self._usable and all(
            math.isfinite(norm)
            or (self.scaler.is_enabled() and bool(torch.isfinite(gradients[parameter]).all()))
            for parameter, norm in norms.items()
        )

    def _update_remaining(self, factor: float, lr: float) -> None:
        if not self._is_immediate:
            parts = (Part.WEIGHTS, Part.STATE, Part.GRADIENTS)
            for slice in self._tour(parts, (Part.WEIGHTS, Part.STATE)):
                _scale(slice.trained, factor)
                _step(slice, lr)
        _scale(self._resident.trained, factor)
        _step(self._resident, lr)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def require_finite_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise NumericError(
            f"the loss is {loss}; try a smaller optimizer.lr, clip_grad_norm=1 or precision=fp32"
        )


def is_finite(norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Whether the gradients can be used; an overflow is an error unless fp16 training handles it."""
    if not math.isfinite(norm) and not scaler.is_enabled():
        raise NumericError(
            f"the gradient norm is {norm}; try a smaller optimizer.lr, clip_grad_norm=1 or precision=fp32"
        )
    return math.isfinite(norm)


def clip_factor(norm: float, max_norm: float) -> float:
    # The formula of torch.nn.utils.clip_grad_norm_. Multiplying by 1.0 is exact, so a limit that is not reached
    # changes no bit.
    return min(1.0, max_norm / (norm + 1e-6))


def norms_on(device: torch.device, gradients: Sequence[Tensor]) -> Tensor:
    """The norms of gradients of one dtype on one device."""
    if not is_accelerator(device):
        return torch.stack(foreach_norm(gradients))
    return torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])


def norms_of(gradients: Sequence[Tensor | None]) -> Tensor:
    """The norms in double precision on the CPU, with NO_GRADIENT for None."""
    stacked = torch.full((len(gradients),), NO_GRADIENT, dtype=torch.float64)
    places: defaultdict[torch.dtype, defaultdict[torch.device, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            places[gradient.dtype][gradient.device].append(index)
    for by_device in places.values():
        rows = [
            norms_on(device, [gradient for index in indices if (gradient := gradients[index]) is not None])
            for device, indices in by_device.items()
        ]
        # Reading a device makes the host wait for it, so all norms come to one device first.
        gathered = [row for row in start_copy(tuple(rows), rows[0].device).receive() if row is not None]
        stacked[list(chain(*by_device.values()))] = torch.cat(gathered).to("cpu").to(torch.float64)
    return stacked


def global_norm(norms: Tensor) -> float:
    """The 2-norm of all gradients together: the norm of their norms, in the order given."""
    # Floating-point sums depend on their order, so the order of names, not of partitions or ranks, decides the bits.
    return float(torch.linalg.vector_norm(norms[norms != NO_GRADIENT]))


def _scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _step(group: Slice | ResidentParameters, lr: float) -> Collection[Part]:
    """Update the parameters in memory; the parts that have changed."""
    if group.optimizer is None:
        return ()
    set_lr(group.optimizer, lr)
    # Not scaler.step, which would judge this slice alone: fp16 decides over all slices whether to update.
    group.optimizer.step()
    _drop_gradients(group)
    return (Part.WEIGHTS, Part.STATE)


def _drop_gradients(group: Slice | ResidentParameters) -> None:
    for parameter in group.trained:
        parameter.grad = None
