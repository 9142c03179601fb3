"""How much memory slices need on a device, and the fewest slices that fit engine.memory; no layer is run.

Without engine.memory, engines/offload.py divides the layers into engine.slices.

A slice needs its weights, optimizer state and stored gradients once per buffer. While the step is in it, it also needs
its gradients, and then either the activations that its layers save for backward, or what its update takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, final

import torch
from torch import nn

from gpipe_cli.balance.solver import solve
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.prefetcher import MAX_INPUTS_IN_FLIGHT
from gpipe_cli.offload.slices import SlicedParameters
from gpipe_cli.offload.tiers import padded
from gpipe_cli.profiling.memory import MakeOptimizer, state_bytes, update_bytes
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.torch_internals.tensors import ALIGNMENT
from gpipe_cli.values import format_bytes

SMALLEST_ALLOCATION = 512
"""What torch allocates for a scalar on an accelerator, such as the norm of a gradient."""


def layer_bytes(module: nn.Sequential, *, trained_only: bool = False) -> list[int]:
    """The bytes of each layer's parameters; a shared parameter counts for its first layer."""
    counted: set[nn.Parameter] = set()
    sizes = []
    for layer in module:
        own = set(layer.parameters()) - counted
        counted |= own
        counting = (parameter for parameter in own if parameter.requires_grad or not trained_only)
        sizes.append(sum(padded(parameter.nbytes) for parameter in counting))
    return sizes


@final
class LayerBytes(NamedTuple):
    """The bytes of a layer's own parameters, and of what comes with them."""

    frozen: int
    weights: int
    """The trained parameters."""
    gradients: int
    state: int
    """The optimizer's state."""
    update: int
    """What an update takes beyond these: temporaries, and in the first one a state that is not in its buffer yet."""


@final
@dataclass(frozen=True)
class DeviceDemand:
    """The bytes that slices need on the device at the same time."""

    layers: Sequence[LayerBytes]
    resident: int
    """What stays on the device: the mini-batch, buffers, and parameters that several layers share."""
    facts: ModelStats
    buffers: int
    stores_gradients: bool
    """Whether the update waits for the gradients of all slices."""
    micro_batches: int
    recomputed: int
    """How many micro-batches; the others save all their activations between forward and backward."""

    def of(self, balance: Sequence[int]) -> int:
        ranges = list(pairwise([0, *accumulate(balance)]))
        slices = [_added(self.layers[begin:end]) for begin, end in ranges]
        gradients = max(slice.gradients for slice in slices)
        # Each part has its own memory in a buffer, as large as in the largest slice.
        moved = max(slice.frozen for slice in slices) + max(slice.weights for slice in slices)
        moved += max(slice.state for slice in slices)
        moved += gradients if self.stores_gradients else 0
        # The activations are gone when the update begins.
        working = max(
            max(self._backward(begin, end), slice.update)
            for (begin, end), slice in zip(ranges, slices, strict=True)
        )
        return (
            self.resident
            + min(self.buffers, len(balance)) * moved
            + gradients
            + working
            + self.activations(balance)
        )

    def activations(self, balance: Sequence[int]) -> int:
        """What micro-batches keep of slices that are not on the device, and what passes between slices."""
        ranges = list(pairwise([0, *accumulate(balance)]))
        always_saved = (self.micro_batches - self.recomputed) * self.facts.saved_bytes(0, len(self.layers))
        return always_saved + self._boundaries(ranges)

    @property
    def least(self) -> int:
        """No balance needs less: one layer on the device, and nothing that passes between slices."""
        single = [1] * len(self.layers)
        boundaries = self._boundaries(list(pairwise([0, *accumulate(single)])))
        return replace(self, buffers=1).of(single) - boundaries

    def copied_bytes(self, balance: Sequence[int]) -> list[int]:
        """What a step copies to and from the device, one number for each slice on its way forward and back."""
        slices = [_added(self.layers[begin:end]) for begin, end in pairwise([0, *accumulate(balance)])]
        forward = [each.frozen + each.weights for each in slices]
        # The gradients go away and come back, with the weights, if the update waits for all of them.
        waiting = [
            2 * each.gradients + each.frozen + each.weights if self.stores_gradients else 0 for each in slices
        ]
        backward = [
            each.frozen + 2 * each.weights + 2 * each.state + more
            for each, more in zip(slices, waiting, strict=True)
        ]
        return forward + backward

    def _backward(self, begin: int, end: int) -> int:
        """What forward and backward of one micro-batch need in a slice: activations, and gradients on their way."""
        layers = range(begin, end)
        flowing = max(self.facts.layers[layer].saved_bytes for layer in layers)
        outputs = 2 * max(self.facts.layers[layer].output_bytes for layer in layers)
        # Autograd adds the gradient of a second micro-batch to the first when it is complete.
        added = max(self.layers[layer].gradients for layer in layers) if self.micro_batches > 1 else 0
        return self.facts.saved_bytes(begin, end) + flowing + outputs + added

    def _boundaries(self, ranges: Sequence[tuple[int, int]]) -> int:
        """A slice runs all micro-batches, so at some moment all that enters or leaves it is on the device."""
        largest = max((self.facts.partition_input(*layers).bytes for layers in ranges[1:]), default=0)
        # One more is loaded for its recomputation.
        return (self.micro_batches + MAX_INPUTS_IN_FLIGHT + 1) * largest

    def slices(self, costs: Sequence[float], limit: int) -> list[int]:
        """The balance with the fewest slices that stay within the limit."""
        needed = []
        # Not a bisection: balances even out costs, not bytes, so more slices do not always need less memory.
        for count in range(1, len(costs) + 1) if self.least <= limit else (len(costs),):
            balance = solve(costs, count).balance
            needed.append(self.of(balance))
            if needed[-1] <= limit:
                return balance
        least = min(needed)
        raise ConfigError(
            f"engine.memory={format_bytes(limit)}: is too little, {format_bytes(least)} are needed with one layer in "
            "each slice; try more chunks, checkpoint=always or more memory"
        )


def device_demand(
    module: nn.Sequential,
    make: MakeOptimizer | None,
    device: torch.device,
    facts: ModelStats,
    *,
    buffers: int,
    stores_gradients: bool,
    micro_batches: int,
    recomputed: int,
    batch_bytes: int,
) -> DeviceDemand:
    """batch_bytes: of a mini-batch, which stays on the device during its step."""
    parameters = SlicedParameters.of(module, [1] * len(module))
    groups = [list(parameters.shared), *parameters.slices]
    names = {parameter: name for name, parameter in module.named_parameters()}
    shared, *layers = _bytes_of(groups, names, make, device)
    # Each of the layers that share a parameter has a gradient of its own; hardly ever are there more than two.
    shared_bytes = shared.frozen + shared.weights + shared.state + 3 * shared.gradients + shared.update
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    scalars = SMALLEST_ALLOCATION * sum(map(len, groups))
    return DeviceDemand(
        layers=layers,
        resident=batch_bytes + buffer_bytes + shared_bytes + scalars,
        facts=facts,
        buffers=buffers,
        stores_gradients=stores_gradients,
        micro_batches=micro_batches,
        recomputed=recomputed,
    )


def _bytes_of(
    groups: Sequence[Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str],
    make: MakeOptimizer | None,
    device: torch.device,
) -> list[LayerBytes]:
    parameters = list(chain.from_iterable(groups))
    named = [(names[parameter], parameter) for parameter in parameters]
    none = [0] * len(parameters)
    states = none if make is None else state_bytes(make, named)
    updates = none if make is None else update_bytes(make, parameters, device)
    each = {
        parameter: LayerBytes(
            frozen=0 if parameter.requires_grad else padded(parameter.nbytes),
            weights=padded(parameter.nbytes) if parameter.requires_grad else 0,
            gradients=padded(parameter.nbytes) if parameter.requires_grad and make is not None else 0,
            state=padded(state),
            update=padded(update),
        )
        for parameter, state, update in zip(parameters, states, updates, strict=True)
    }
    return [_added([each[parameter] for parameter in group]) for group in groups]


def _added(layers: Sequence[LayerBytes]) -> LayerBytes:
    return LayerBytes(*map(sum, zip(*layers, strict=True))) if layers else LayerBytes(0, 0, 0, 0, 0)


def optimizer_bytes(module: nn.Sequential, make: MakeOptimizer | None) -> list[int]:
    """Per layer."""
    if make is None:
        return [0] * len(module)
    named = list(module.named_parameters())
    sizes = dict(zip((parameter for _, parameter in named), state_bytes(make, named), strict=True))
    return [sum(sizes[parameter] for parameter in layer.parameters()) for layer in module]


def boundary_bytes(
    module: nn.Sequential,
    balance: Sequence[int],
    recomputed: Sequence[int],
    make_sample: Callable[[], Sample],
) -> int:
    """An upper bound for the inputs from which slices are recomputed; recomputed: micro-batches of each slice.

    0 if a layer's shapes depend on values: nothing is known of such a model before it runs.
    """
    if not any(recomputed):
        return 0
    try:
        facts = model_stats(module, make_sample(), count_flops=False)
    except ConfigError:
        return 0
    # The input of the first slice is the caller's, and stays; slices before the first trained layer recompute nothing.
    slices = zip(pairwise(accumulate(balance)), recomputed[1:], strict=True)
    stored = [(facts.partition_input(*own), count) for own, count in slices if own[1] > facts.frozen_layers]
    return sum(count * (input.bytes + ALIGNMENT * len(input.shapes)) for input, count in stored)
