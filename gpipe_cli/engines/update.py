"""From gradients to new parameters: unscale, check, clip, step.

Norms are taken per parameter and reduced in the order of the model's own names, so the result does not depend
on how the model was partitioned.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Final, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.copies import start_copy
from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.engines.collectives import Collectives
from gpipe_cli.engines.half_precision import (
    GRADIENT_SCALE,
    RANDOM_KEY,
    HalfPrecisionOptimizer,
    LostUpdates,
    is_half,
)
from gpipe_cli.engines.parameters import EngineParameters, Group
from gpipe_cli.engines.protocol import BatchResult
from gpipe_cli.errors import NumericError
from gpipe_cli.offload.slices import Part, Slice
from gpipe_cli.torch_internals.gradients import foreach_norm, unscale

NO_GRADIENT: Final = -1.0
"""Takes the place of a norm, which is never negative."""
MAX_CONSECUTIVE_SKIPS = 20
"""The scale halves each time: from torch's first scale, 65,536, to 1/16, where the scale is not what overflows."""


@final
class Update:
    """Updates the parameters of an engine group by group, and adapts the loss scale of fp16 training.

    A slice of an offloaded model is updated as soon as its backward is done. Clipping and fp16 need the gradients of
    all slices first: then each slice stores its gradients, and a second visit to all slices updates them.
    """

    def __init__(
        self,
        parameters: EngineParameters,
        *,
        clip_grad_norm: float | None,
        scale_loss: bool,
        device: torch.device,
        collectives: Collectives,
    ) -> None:
        self._parameters, self._clip = parameters, clip_grad_norm
        self._device, self._collectives = device, collectives
        self.scaler = torch.amp.GradScaler(device.type, enabled=scale_loss)
        # The scaler creates its scale when it sees the first loss, which a process without the last layer never does.
        self.scaler.scale(torch.zeros((), device=device))
        others = [] if parameters.shards is None else parameters.shards.others
        # The scaler takes gradients from an optimizer; this one updates nothing and has no state.
        self._of_others = torch.optim.SGD(others) if others else None
        self._lr, self._key = 0.0, 0
        self._lost_updates = LostUpdates() if any(map(is_half, parameters.trained)) else None
        self._norms: dict[nn.Parameter, float] = {}
        self._is_usable = True
        self._overflowed = False
        self._consecutive_skips = 0
        self._failed = False
        for prefetcher in parameters.prefetchers:
            prefetcher.completion = self

    @property
    def _is_immediate(self) -> bool:
        return not update_waits(self._clip, scale_loss=self.scaler.is_enabled())

    @property
    def needs(self) -> Collection[Part]:
        """The parts of a slice besides its weights that `completed` works on."""
        return (Part.STATE,) if self._is_immediate else ()

    def begin(self, lr: float, key: int) -> None:
        """Forget the previous step. lr, key: of the step that comes next."""
        for parameter in self._parameters.trained:
            parameter.grad = None
        self._lr, self._key = lr, key
        self._norms.clear()
        self._is_usable = True

    def completed(self, slice: Slice) -> Collection[Part]:
        """Called on the worker thread when the gradients of a slice are complete; the parts that have changed."""
        if self._failed:  # the step only runs again to find where its numbers stopped being finite
            return ()
        # The worker has re-entered the caller's autocast, which must not affect an optimizer that multiplies matrices.
        with torch.autocast(self._device.type, enabled=False):
            self._record_norms(slice)
            # The norm of finite numbers may still overflow, which is no reason to lower the loss scale.
            self._is_usable = self._is_usable and all(
                math.isfinite(self._norms[parameter])
                or (self.scaler.is_enabled() and bool(torch.isfinite(parameter.grad).all()))
                for parameter in slice.trained
                if parameter.grad is not None
            )
            if self._is_usable and not self._is_immediate:
                return (Part.GRADIENTS,)
            if self._is_usable:
                self._step(slice)
                return () if slice.optimizer is None else (Part.WEIGHTS, Part.STATE)
            if self.scaler.is_enabled():  # fp16 overflowed, which is normal
                _drop_gradients(slice)
            return ()  # otherwise the gradients stay, so that the first nonfinite one can be named

    def norms(self) -> Tensor:
        """Undo the loss scale, and take the norms of the gradients of this process."""
        self._record_norms(self._parameters.resident)
        # If one rank skipped the update and another did not, their parameters would never match again.
        self._overflowed = self._collectives.agree_on_overflow(self.scaler)
        recorded = [self._norms.get(parameter, NO_GRADIENT) for parameter in self._parameters.trained]
        return torch.tensor(recorded, dtype=torch.float64)

    def apply(self, facts: BatchResult, norms: Tensor) -> BatchResult:
        """Update what is not updated yet, or skip it if scaled gradients overflowed; add what came of it to the facts.

        norms: of all processes.
        """
        try:
            # Before the gradients, which are not finite either then: the loss is the more telling message.
            require_finite_loss(facts.loss)
            # Also without clipping: the norm is the check for finite gradients.
            norm = global_norm(norms)
            finite = is_finite(norm, self.scaler)
        except NumericError:
            self._failed = True
            raise
        if not self._overflowed:
            self._update_remaining(
                clip_factor(norm, self._clip) if finite and self._clip is not None else None
            )
        self._finish()
        share = None if self._lost_updates is None else self._lost_updates.share
        if share is not None:
            self._lost_updates = None  # it is counted in one step
        grad_norm = norm if finite else None
        return replace(facts, grad_norm=grad_norm, skipped=self._overflowed, lost_updates=share)

    def _update_remaining(self, factor: float | None) -> None:
        parts = (Part.WEIGHTS, Part.STATE, Part.GRADIENTS)
        groups = self._parameters.visit(parts, (Part.WEIGHTS, Part.STATE))
        for group in [self._parameters.resident] if self._is_immediate else groups:
            if factor is not None:
                _scale(group.trained, factor)
            self._step(group)

    def _finish(self) -> None:
        """Adapt the loss scale after an update that was made or skipped; raise if too many in a row were skipped."""
        self.scaler.update()
        self._consecutive_skips = self._consecutive_skips + 1 if self._overflowed else 0
        if self._consecutive_skips == MAX_CONSECUTIVE_SKIPS:
            raise NumericError(
                f"the gradients overflowed in {MAX_CONSECUTIVE_SKIPS} steps in a row, down to a loss scale of "
                f"{self.scaler.get_scale():g}; try a smaller optimizer.lr, precision=bf16 or precision=fp32"
            )

    def _record_norms(self, group: Group) -> None:
        """Undo the loss scale and record the norms."""
        # Before norms are taken: clipping compares the true norm with its limit.
        for optimizer in (group.optimizer, None if isinstance(group, Slice) else self._of_others):
            if optimizer is not None:
                # This also records overflows for each optimizer; scaler.update adapts the scale to all of them.
                unscale(self.scaler, optimizer)
        gradients = {parameter: parameter.grad for parameter in group.trained if parameter.grad is not None}
        # The one wait of the host in the update of a slice: it must know that the gradients are finite.
        norms = norms_of(list(gradients.values())).tolist()
        for parameter, norm in zip(gradients, norms, strict=True):
            still_scaled = parameter.dtype == torch.float16
            self._norms[parameter] = norm / self.scaler.get_scale() if still_scaled else norm

    def _step(self, group: Group) -> None:
        """Update the parameters in memory."""
        if group.optimizer is None:
            return
        prepare_step(group.optimizer, self._lr, self._key, self.scaler)
        with self._counting_lost_updates(group.optimizer):
            # Not scaler.step, which would judge this group alone: fp16 decides over all groups whether to update.
            group.optimizer.step()
        if isinstance(group, Slice):
            _drop_gradients(group)

    def _counting_lost_updates(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        # Not while the learning rate warms up, when many more updates are lost.
        warms_up = self._lr < optimizer.defaults.get("lr", 0.0) / 2
        if self._lost_updates is None or warms_up or isinstance(optimizer, HalfPrecisionOptimizer):
            return nullcontext()
        return self._lost_updates.counted(optimizer)


def update_waits(clip_grad_norm: float | None, *, scale_loss: bool) -> bool:
    """Whether the update waits for the gradients of all slices, which are stored until then."""
    return clip_grad_norm is not None or scale_loss


def prepare_step(optimizer: torch.optim.Optimizer, lr: float, key: int, scaler: torch.amp.GradScaler) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if RANDOM_KEY in group:
            group[RANDOM_KEY], group[GRADIENT_SCALE] = key, scaler.get_scale()


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
    # A norm of float16 gradients that are still scaled may be too large for their dtype.
    if not is_accelerator(device) and gradients[0].dtype != torch.float16:
        return torch.stack(foreach_norm(gradients))
    dtype = torch.float32 if gradients[0].dtype == torch.float16 else None
    return torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients])


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


def _drop_gradients(slice: Slice) -> None:
    for parameter in slice.trained:
        parameter.grad = None
