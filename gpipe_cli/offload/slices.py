"""Slices: the parameters of consecutive layers, their optimizer state, and at times their gradients.

Frozen parameters are a part of their own, which no update loads or stores. Each part is stored on a tier and loaded to
the device as a whole; layers and optimizer see views of that memory while it is loaded. Buffers are no part of a slice:
layers may write them at any time, and they are small.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.offload.tiers import StoredTensors, Tier, placeholder
from gpipe_cli.pipeline.tied import TiedParameters
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.torch_internals.deferred_values import replace_value
from gpipe_cli.torch_internals.tensors import exchanges_memory, storage_of


@final
class Part(enum.Enum):
    FROZEN = "frozen weights"
    WEIGHTS = "weights"
    """The trained parameters."""
    STATE = "state"
    """Optimizer state, from the first update on; tensors without a dimension stay in memory."""
    GRADIENTS = "gradients"
    """Only where an update has to wait for the gradients of all slices."""


ALL_WEIGHTS = (Part.FROZEN, Part.WEIGHTS)
"""What the layers of a slice need to run."""


@final
class Slice:
    def __init__(
        self,
        tier: Tier,
        parameters: Sequence[nn.Parameter],
        value_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """value_of: returns the value of a parameter that is a placeholder."""
        self.parameters = list(parameters)
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        """The engine that trains the slice sets it."""
        self._tier = tier
        self._parameters = {Part.FROZEN: self.frozen, Part.WEIGHTS: self.trained}
        self._stored: dict[Part, StoredTensors] = {}
        self._state_keys: list[tuple[nn.Parameter, str]] = []
        self._with_gradient: set[nn.Parameter] = set()
        for part, own in self._parameters.items():
            if own:
                weights = self._stored[part] = StoredTensors(tier, [parameter.data for parameter in own])
                for index, parameter in enumerate(own):
                    weights.put(index, value_of(parameter.data))
                    parameter.data = weights.resting_tensors[index]

    def stored(self, part: Part) -> StoredTensors | None:
        """None if the slice does not have this part yet."""
        return self._stored.get(part)

    @property
    def all_stored(self) -> list[StoredTensors]:
        return list(self._stored.values())

    def attach(self, part: Part, memory: Tensor) -> None:
        """Let layers and optimizer see what was loaded to `memory`."""
        self._assign(part, self._stored[part].views(memory))

    def detach(self) -> None:
        """Hide memory that another slice will use from layers and optimizer; they read no gradients in between."""
        for part in (*ALL_WEIGHTS, Part.STATE):
            if part in self._stored:
                self._assign(part, self._stored[part].resting_tensors)

    def _assign(self, part: Part, tensors: Sequence[Tensor]) -> None:
        if part in self._parameters:
            for parameter, tensor in zip(self._parameters[part], tensors, strict=True):
                # Through .data the Parameter stays the same object for optimizers, hooks and autograd; only its memory
                # changes.
                parameter.data = tensor
        elif part is Part.STATE:
            for (parameter, key), tensor in zip(self._state_keys, tensors, strict=True):
                assert self.optimizer is not None, "only an optimizer has state"
                self.optimizer.state[parameter][key] = tensor
        else:
            for parameter, tensor in zip(self.trained, tensors, strict=True):
                parameter.grad = tensor if parameter in self._with_gradient else None

    def gather(self, part: Part, memory: Callable[[Part, int], Tensor]) -> None:
        """Copy tensors that backward or the optimizer created into `memory(part, nbytes)`, to be stored from there."""
        if part is Part.STATE:
            state: dict[Any, dict[str, Any]] = {} if self.optimizer is None else self.optimizer.state
            current = {
                (parameter, key): value
                for parameter in self.trained
                for key, value in state.get(parameter, {}).items()
                if isinstance(value, Tensor) and value.dim() > 0
            }
            self._state_keys, tensors = list(current), list(current.values())
        elif part is Part.GRADIENTS:
            self._with_gradient = {parameter for parameter in self.trained if parameter.grad is not None}
            # A parameter without a gradient puts its weights in the place, so that the layout stays the same in every
            # step; `_assign` ignores them.
            tensors = [
                parameter.data if parameter.grad is None else parameter.grad for parameter in self.trained
            ]
        else:
            return
        stored = self._stored.get(part)
        if stored is None or not _fits(stored, tensors):
            stored = self._stored[part] = StoredTensors(self._tier, tensors)
        for view, tensor in zip(stored.views(memory(part, stored.layout.nbytes)), tensors, strict=True):
            # What was updated in place is in the buffer already; only tensors that were created during the visit are
            # copied.
            if view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
        if part is Part.GRADIENTS:
            for parameter in self.trained:
                parameter.grad = None


def _fits(stored: StoredTensors, tensors: Sequence[Tensor]) -> bool:
    return [(slot.dtype, slot.size) for slot in stored.layout.slots] == [
        (tensor.dtype, tuple(tensor.shape)) for tensor in tensors
    ]


@final
@dataclass(frozen=True)
class SlicedParameters:
    """The parameters of a sequence, by slice."""

    slices: list[list[nn.Parameter]]
    """The parameters of each slice that only one layer uses."""
    shared: dict[nn.Parameter, int]
    """Parameters that several layers use, each with its first slice, on whose device it stays."""

    @staticmethod
    def of(module: nn.Sequential, balance: Sequence[int]) -> SlicedParameters:
        layers = list(module)
        ends = list(accumulate(balance))
        # In each mini-batch every layer gets an alias of a tied parameter before the first slice is loaded, and the
        # gradients of the aliases are added after the last slice is gone. So tied parameters stay on the device even
        # where all their layers are in one slice.
        shared = {
            parameter: bisect_right(ends, users[0]) for parameter, users in TiedParameters(layers).users
        }
        slices = []
        for begin, end in pairwise([0, *ends]):
            own = (parameter for layer in layers[begin:end] for parameter in layer.parameters())
            slices.append(list(dict.fromkeys(parameter for parameter in own if parameter not in shared)))
        return SlicedParameters(slices, shared)

    def place_shared(
        self, devices: Sequence[torch.device], value_of: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Move each shared parameter to the device of its first slice; slices take the devices in turn."""
        for parameter, slice in self.shared.items():
            value = parameter.data if value_of is None else value_of(parameter.data)
            parameter.data = value.to(devices[slice % len(devices)])

    def store(self, tier: Tier, value_of: Callable[[Tensor], Tensor] | None = None) -> dict[int, Slice]:
        """Move the other parameters to the tier, slice by slice."""
        read = (lambda tensor: tensor) if value_of is None else value_of
        return {index: Slice(tier, own, read) for index, own in enumerate(self.slices)}


def put_parameters_on(device: torch.device, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Prepare parameters that are to move between the host and the device; returns what then reads their values.

    A deferred parameter, and every one where torch cannot replace the memory of a parameter by that of the device, gets
    a placeholder at once.
    """
    home = torch.device("cpu") if exchanges_memory(device) else device
    values: dict[int, Callable[[], Tensor]] = {}
    for parameter in module.parameters():
        data, empty = parameter.data, placeholder(parameter.dtype, parameter.shape, home)
        if isinstance(parameter, DeferredParameter):
            values[storage_of(empty)] = parameter.read
            parameter.become(empty)
        elif not exchanges_memory(device):
            values[storage_of(empty)] = partial(_itself, data)
            replace_value(parameter, empty)

    def value(tensor: Tensor) -> Tensor:
        # Each value is read once, and not kept in memory longer.
        read = values.pop(storage_of(tensor), None)
        return tensor if read is None else read()

    return value


def _itself(value: Tensor) -> Tensor:
    return value
