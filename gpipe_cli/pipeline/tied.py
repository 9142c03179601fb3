"""Parameters that several layers share.

Each layer uses a parameter of its own, so no two workers add to one gradient: with the memory of the shared one, or a
copy of it where the layer is on another device. The pipe sums these gradients in the order of the layers, so the bits
are the same for every balance: once per mini-batch, or, in a step, once per micro-batch if the parameter has hooks,
because a hook need not be linear. The sum reaches the parameter through autograd: hooks run, and an existing `.grad` is
added to. Users tie, load, write and parametrize at any time, so the pipe looks for shared parameters, and copies those
of other devices, in every mini-batch.

Buffers that layers on several devices share are copied as well. No layer may write what is copied: layers on other
devices would not see it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipe_cli.accelerator.copies import DeviceCopy, start_copy
from gpipe_cli.pipeline.module_state import modules_of, tensors_in
from gpipe_cli.torch_internals.autograd import has_hooks, run_backward
from gpipe_cli.torch_internals.tensors import version_of


@final
@dataclass(frozen=True, slots=True)
class _Use:
    module: nn.Module
    name: str
    tensor: Tensor


@final
class _Copies:
    """Copies of shared tensors on a device that is not theirs, for one mini-batch."""

    __slots__ = ("_copy", "tensors")

    def __init__(self, originals: Sequence[Tensor], device: torch.device) -> None:
        self._copy: DeviceCopy = start_copy(tuple(tensor.detach() for tensor in originals), device)
        self.tensors: Mapping[Tensor, Tensor] = dict(zip(originals, self._copy.tensors, strict=True))  # type: ignore[arg-type]

    def receive(self) -> None:
        """Called by the thread that uses the copies: its current stream waits for them."""
        self._copy.receive()


@final
class Untied:
    """Context manager: inside, the modules of one layer use tensors of their own in place of the shared ones."""

    __slots__ = ("_before", "_copied", "_copies", "_own", "_uses", "_versions")

    def __init__(
        self,
        uses: Sequence[_Use],
        copies: _Copies | None = None,
        copied: Collection[Tensor] = (),
        *,
        tracked: bool = True,
    ) -> None:
        """copies: on the layer's device, if some of the shared tensors are on another.
        copied: all tensors of which some device has a copy.
        tracked: whether gradients are wanted; otherwise only copies take the place of anything.
        """
        here = {} if copies is None else copies.tensors
        self._uses = [use for use in uses if use.tensor in here or (tracked and _is_parameter(use.tensor))]
        self._own = {
            use.tensor: _own(use.tensor, here.get(use.tensor), tracked=tracked) for use in self._uses
        }
        self._copied = [use for use in uses if use.tensor in copied]
        self._copies = copies if any(use.tensor in here for use in uses) else None

    @property
    def any(self) -> bool:
        """Whether it does anything."""
        return bool(self._uses or self._copied)

    def __enter__(self) -> None:
        if self._copies is not None:
            self._copies.receive()
        # Not `use.tensor`: the user may have replaced it before a recompute.
        self._before = [getattr(use.module, use.name) for use in self._uses]
        # Only the worker that runs this layer touches its modules meanwhile, so the swap needs no lock.
        for use in self._uses:
            setattr(use.module, use.name, self._own[use.tensor])
        self._versions = self._versions_of_copied() if self._copied else []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        written = self._copied and kind is None and self._versions != self._versions_of_copied()
        replaced = [
            use
            for use in self._uses
            if _is_parameter(use.tensor) and getattr(use.module, use.name) is not self._own[use.tensor]
        ]
        for use, before in zip(self._uses, self._before, strict=True):
            setattr(use.module, use.name, before)
        if replaced and kind is None:
            raise RuntimeError(
                f"a layer replaced '{replaced[0].name}' of a {type(replaced[0].module).__name__} in its forward, and "
                "other layers hold it too. Write it under torch.no_grad(), or do not share it"
            )
        if written:
            names = ", ".join(f"'{use.name}' of a {type(use.module).__name__}" for use in self._copied)
            raise RuntimeError(
                f"a layer wrote or replaced a tensor that it shares with layers on another device ({names}), which "
                "would not see it. Put the layers that share it on one device"
            )

    def _versions_of_copied(self) -> list[tuple[int, int]]:
        """What changes if the layer writes or replaces a tensor of which there are copies."""
        tensors = [getattr(use.module, use.name) for use in self._copied]
        return [(id(tensor), version_of(tensor)) for tensor in tensors]

    def take_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        own = self._own.get(parameter)
        if own is None or own.grad is None:
            return None
        gradient, own.grad = own.grad, None
        return gradient


NOTHING_TIED = Untied(())


@final
class TiedParameters:
    """Which layers share which parameters, as of now."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        devices: Sequence[torch.device] = (),
        *,
        separate_hooked: bool = False,
    ) -> None:
        """devices: of each layer; empty if all layers are on one device.
        separate_hooked: whether layers also use parameters of their own in place of those that have hooks.
        """
        users: dict[nn.Parameter, list[int]] = {}
        for place, layer in enumerate(layers):
            held = dict.fromkeys(
                each for module in modules_of([layer]) for each in module._parameters.values()
            )
            for parameter in held:
                if parameter is not None:
                    users.setdefault(parameter, []).append(place)
        self.holders: Mapping[Tensor, Sequence[int]] = dict(users.items())
        """The layers that hold each parameter."""
        self.trained = [parameter for parameter in users if parameter.requires_grad]
        """All parameters that require grad, shared or not, once each."""
        self.users = [
            (parameter, places)
            for parameter, places in users.items()
            if len(places) > 1 or (separate_hooked and has_hooks(parameter))
        ]
        """Each shared parameter and the layers that use it."""
        self.separated = {parameter for parameter, _ in self.users}
        shared: set[Tensor] = {*self.separated}
        if devices:
            shared |= _buffers_on_several(devices, layers)
        self._uses = [_uses(layer, shared) for layer in layers] if shared else [[] for _ in layers]
        self._devices = devices
        self._copies: Mapping[torch.device | None, _Copies] = _start_copies(self._uses, devices)
        self._copied = {tensor for copies in self._copies.values() for tensor in copies.tensors}

    @property
    def any_hooks(self) -> bool:
        """Whether a hook runs when a gradient reaches a shared parameter."""
        return any(has_hooks(parameter) for parameter, _ in self.users)

    def untied(self, *, tracked: bool = True) -> list[Untied]:
        """A fresh set of separate parameters, one object per layer. tracked: whether gradients are wanted."""
        if not tracked and not self._copies:
            return [NOTHING_TIED] * len(self._uses)
        untied = [
            Untied(uses, self._copies.get(device), self._copied, tracked=tracked) if uses else NOTHING_TIED
            for uses, device in zip_longest(self._uses, self._devices)
        ]
        return [each if each.any else NOTHING_TIED for each in untied]

    def add_up(self, untied: Sequence[Untied], exclude: Collection[nn.Parameter] = ()) -> None:
        """Give each shared parameter, except those in `exclude`, the gradient of all its uses."""
        for parameter, _ in self.users:
            if parameter not in exclude:
                total = self.take_sum(untied, parameter)
                if total is not None:
                    accumulate(parameter, total)

    def take_sum(self, untied: Sequence[Untied], parameter: nn.Parameter) -> Tensor | None:
        """The gradient of all uses of a shared parameter, in the order of the layers."""
        gradients = tuple([layer.take_gradient(parameter) for layer in untied])
        return sum_present(start_copy(gradients, parameter.device).receive())


def sum_present(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of those that are not None, from the first to the last."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to `.grad` as autograd does."""
    run_backward([get_gradient_edge(parameter)], [gradient], keep_graph=False)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _own(tensor: Tensor, copy: Tensor | None, *, tracked: bool) -> Tensor:
    own = tensor.detach() if copy is None else copy
    if _is_parameter(tensor):
        own = nn.Parameter(own, requires_grad=tensor.requires_grad and tracked)
    # Layers may look for attributes that users set on a parameter.
    own.__dict__.update(tensor.__dict__)
    return own


def _uses(layer: nn.Module, shared: set[Tensor]) -> list[_Use]:
    return [_Use(module, name, tensor) for module, name, tensor in tensors_in(layer) if tensor in shared]


def _buffers_on_several(devices: Sequence[torch.device], layers: Sequence[nn.Module]) -> set[Tensor]:
    """The buffers that layers on several devices share."""
    users: dict[Tensor, set[torch.device]] = {}
    for layer, device in zip(layers, devices, strict=True):
        for buffer in layer.buffers():
            users.setdefault(buffer, set()).add(device)
    return {buffer for buffer, used_on in users.items() if len(used_on) > 1}


def _start_copies(
    uses: Sequence[Sequence[_Use]], devices: Sequence[torch.device]
) -> dict[torch.device | None, _Copies]:
    """By device, the copies of what its layers share with layers on others."""
    wanted: dict[torch.device, dict[Tensor, None]] = {}
    for uses_of_layer, device in zip(uses, devices, strict=False):
        for use in uses_of_layer:
            if use.tensor.device != device:
                wanted.setdefault(device, {})[use.tensor] = None
    return {device: _Copies(list(tensors), device) for device, tensors in wanted.items()}
