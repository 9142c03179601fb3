"""From gradients to new parameters, slice by slice: an update as soon as a slice's backward is done.

Clipping and fp16 need all gradients first: then slices hand in theirs, and are updated in a second round. Norms are
reduced in the order of the model's own names, as in `update`, so both come to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.update import (
    Skips,
    UpdateFacts,
    clip_factor,
    collected,
    global_norm,
    is_finite,
    norm_of,
    require_finite_loss,
    set_rate,
)
from gpipe_cli.errors import NumericError
from gpipe_cli.offload.slice import Part, Slice

__all__ = ["Group", "Round", "SliceUpdate"]

Round = Callable[[Sequence[Part], Collection[Part]], Iterator[Slice]]
"""Brings in all slices, one after another: with which parts, and which of them change."""


@final
@dataclass
class Group:
    """Parameters that are always there, with an optimizer as a slice has one."""

    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None


@final
class SliceUpdate:
    """Owns the loss scale; slices own their optimizers."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        resident: Group,
        round: Round,
        *,
        clip_grad_norm: float | None,
        scale_loss: bool,
        device: torch.device,
    ) -> None:
        self.scaler = torch.amp.GradScaler(device.type, enabled=scale_loss)
        self.lr = 0.0
        """Of the step about to be made."""
        self._parameters = parameters
        self._resident = resident
        self._round = round
        self._clip = clip_grad_norm
        self._device = device
        self._skips = Skips()
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._usable = True
        self._given_up = False

    @property
    def _at_once(self) -> bool:
        return self._clip is None and not self.scaler.is_enabled()

    @property
    def needs(self) -> Collection[Part]:
        return (Part.STATE,) if self._at_once else ()

    def begin(self) -> None:
        """Forget the step before."""
        for parameter in self._parameters:
            parameter.grad = None
        self._norms.clear()
        self._usable = True

    def completed(self, slice: Slice) -> Collection[Part]:
        if self._given_up:  # the step is only run once more to see where it went wrong
            return ()
        # The caller's autocast reaches here, and must not reach an optimizer that multiplies matrices.
        with torch.autocast(self._device.type, enabled=False):
            return self._completed(slice)

    def _completed(self, slice: Slice) -> Collection[Part]:
        self._measure(slice)
        if self._usable:
            return _step(slice, self.lr) if self._at_once else (Part.GRADIENTS,)
        if self.scaler.is_enabled():  # an overflow, which is nothing special
            _forget(slice)
        return ()  # else the gradients stay, for whoever looks for the first that is not finite

    def apply(self, loss: float, lr: float) -> UpdateFacts:
        """What is left to be done once every slice is completed."""
        try:
            require_finite_loss(loss)
            self._measure(self._resident)
            norm = global_norm(collected([self._norms.get(one) for one in self._parameters]))
            finite = is_finite(norm, self.scaler)
        except NumericError:
            self._given_up = True
            raise
        self._update_the_rest(clip_factor(norm, self._clip) if finite and self._clip is not None else 1.0, lr)
        before = self.scaler.get_scale()
        self.scaler.update()
        skipped = self.scaler.get_scale() < before
        self._skips.count(skipped, self.scaler)
        return UpdateFacts(grad_norm=norm if finite else None, skipped=skipped)

    def _measure(self, group: Slice | Group) -> None:
        """Undo the loss scale and note the norms."""
        if group.optimizer is not None:
            self.scaler.unscale_(group.optimizer)
        for parameter in group.trained:
            if parameter.grad is not None:
                norm = self._norms[parameter] = norm_of(parameter.grad)
                # Of finite numbers the norm may still overflow, which the loss scale has no part in.
                finite = bool(torch.isfinite(norm)) or (
                    self.scaler.is_enabled() and bool(torch.isfinite(parameter.grad).all())
                )
                self._usable = self._usable and finite

    def _update_the_rest(self, factor: float, lr: float) -> None:
        if not self._usable:
            return
        if not self._at_once:
            parts = (Part.WEIGHTS, Part.STATE, Part.GRADIENTS)
            for slice in self._round(parts, (Part.WEIGHTS, Part.STATE)):
                _scale(slice.trained, factor)
                _step(slice, lr)
        _scale(self._resident.trained, factor)
        _step(self._resident, lr)


def _scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _step(group: Slice | Group, lr: float) -> Collection[Part]:
    """Update what is there; gives what has changed."""
    if group.optimizer is None:
        return ()
    set_rate(group.optimizer, lr)
    group.optimizer.step()
    _forget(group)
    return (Part.WEIGHTS, Part.STATE)


def _forget(group: Slice | Group) -> None:
    for parameter in group.trained:
        parameter.grad = None
