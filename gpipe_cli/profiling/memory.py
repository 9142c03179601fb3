"""What each partition will need on its device: an estimate from stats, without running the model.

Counts parameters, buffers, gradients and the optimizer's state, and the activations alive at the worst moment under the
schedule. What a layer needs only while it runs does not count.

What an optimizer keeps per parameter, and what its update needs, is found by trying it on small parameters. No
optimizer is known by name: each makes one update of parameters with a few elements, and the shapes of its state then
tell how the state grows. Momenta have the parameter's shape, Adafactor's rows and columns a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.torch_internals.dispatch_modes import LiveBytes

KeptState = Callable[[Sequence[int], Sequence[int]], int]
"""How many bytes of an optimizer's state a process keeps, from those of each parameter and of its state."""
NamedParameters = Iterable[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[NamedParameters], torch.optim.Optimizer]
"""Makes an optimizer of parameters with their names in the model; the names decide the parameter groups.

The constructors of torch.optim are such functions.
"""

StateBytes = Mapping[nn.Parameter, int]
"""What an optimizer keeps for each parameter."""

_SIDES = (2, 3, 5, 7, 11, 13, 17, 19)
"""The shape of a tiny parameter: different primes, so that each side of a state tensor can be told apart."""
_SIDE = 64
"""The side of the parameter whose update is measured: the scalars of an optimizer do not matter beside it."""


def whole_state(sizes: Sequence[int], state_sizes: Sequence[int]) -> int:
    return sum(state_sizes)


@final
@dataclass(frozen=True)
class PartitionMemory:
    parameter_bytes: int
    """Including buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def activation_bytes(stats: ModelStats, balance: Sequence[int], spec: PipelineSpec) -> list[int]:
    """The most that each partition keeps for backward at once."""
    return [
        peaks.bytes(stats.saved_bytes(begin, end), stats.recompute_bytes(begin, end))
        for (begin, end), peaks in zip(_layer_ranges(balance), spec.peaks, strict=True)
    ]


def partition_memory(
    module: nn.Sequential,
    stats: ModelStats,
    balance: Sequence[int],
    spec: PipelineSpec,
    optimizer: MakeOptimizer | StateBytes,
    kept: KeptState = whole_state,
) -> list[PartitionMemory]:
    """One per partition of the balance."""
    resident = resident_memory(module, balance, optimizer, kept)
    activations = activation_bytes(stats, balance, spec)
    return [
        replace(partition, activation_bytes=bytes)
        for partition, bytes in zip(resident, activations, strict=True)
    ]


def with_bytes(
    costs: Sequence[PartitionCost],
    module: nn.Sequential,
    stats: ModelStats,
    balance: Sequence[int],
    optimizer: MakeOptimizer | StateBytes,
    kept: KeptState = whole_state,
    frozen_layers: int = 0,
) -> list[PartitionCost]:
    """The costs of the partitions with what they keep; a partition of frozen layers at the start saves nothing."""
    resident = resident_memory(module, balance, optimizer, kept)
    return [
        replace(
            cost,
            resident_bytes=memory.total_bytes,
            saved_bytes=stats.saved_bytes(begin, end) if end > frozen_layers else 0,
            input_bytes=stats.recompute_bytes(begin, end) if end > frozen_layers else 0,
        )
        for cost, memory, (begin, end) in zip(costs, resident, _layer_ranges(balance), strict=True)
    ]


def resident_memory(
    module: nn.Sequential,
    balance: Sequence[int],
    optimizer: MakeOptimizer | StateBytes | None,
    kept: KeptState = whole_state,
) -> list[PartitionMemory]:
    """The memory of each partition without activations, which needs no stats about the layers.

    optimizer: makes it, or the bytes of its state; None if there is no update.
    """
    partitions = []
    state = state_by_parameter(optimizer, module) if callable(optimizer) else optimizer
    for begin, end in _layer_ranges(balance):
        layers = list(module)[begin:end]
        # A dict counts what layers share once, and keeps the order.
        parameters = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
        buffers = dict.fromkeys(buffer for layer in layers for buffer in layer.buffers())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sizes = [parameter.nbytes for parameter in trained]
        partitions.append(
            PartitionMemory(
                parameter_bytes=sum(tensor.nbytes for tensor in (*parameters, *buffers)),
                gradient_bytes=sum(sizes),
                optimizer_bytes=0 if state is None else kept(sizes, [state[each] for each in trained]),
                activation_bytes=0,
            )
        )
    return partitions


def _layer_ranges(balance: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise([0, *accumulate(balance)])


def state_bytes(make: MakeOptimizer, parameters: NamedParameters) -> list[int]:
    """For each parameter what the optimizer keeps after an update; nothing for a frozen one."""
    named = list(parameters)
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    sizes = {
        parameter: sum(
            _scaled(value, parameter.shape).nbytes for value in state.values() if isinstance(value, Tensor)
        )
        for (_, parameter), state in zip(trained, _states_after_a_step(make, trained), strict=True)
    }
    return [sizes.get(parameter, 0) for _, parameter in named]


def state_by_parameter(make: MakeOptimizer, module: nn.Module) -> StateBytes:
    """The bytes of the optimizer's state for each parameter of a module."""
    named = list(module.named_parameters())
    return dict(zip((parameter for _, parameter in named), state_bytes(make, named), strict=True))


@final
class OptimizerStateShapes:
    """What an optimizer keeps for each of its parameters from the first update on: names, shapes, dtypes."""

    def __init__(self, make: MakeOptimizer, parameters: NamedParameters) -> None:
        named = list(parameters)
        self._states: dict[nn.Parameter, dict[str, Any]] = {}
        try:
            states = _states_after_a_step(make, named)
        except Exception:  # noqa: BLE001 - it may need other gradients than these; training itself will tell
            return
        self._states = {parameter: state for (_, parameter), state in zip(named, states, strict=True)}

    def of(self, parameter: nn.Parameter) -> dict[str, Any] | None:
        """Tensors on the meta device, and numbers; None for an optimizer that cannot be tried out this way."""
        state = self._states.get(parameter)
        if state is None:
            return None
        return {name: _scaled(value, parameter.shape) for name, value in state.items()}


def _scaled(value: Any, shape: Sequence[int]) -> Any:
    """The state of the tiny parameter as it is for a parameter of this shape."""
    if not isinstance(value, Tensor):
        return value
    sides = _SIDES[: len(shape)]
    scaled = [shape[sides.index(side)] if side in sides else side for side in value.shape]
    # An optimizer that flattens its parameter keeps as many elements, in a row or in another shape.
    if value.numel() == prod(sides) and prod(scaled) != prod(shape):
        scaled = [prod(shape)]
    return value.new_empty(scaled, device="meta")


def _states_after_a_step(
    make: MakeOptimizer, parameters: Sequence[tuple[str, nn.Parameter]]
) -> list[dict[str, Any]]:
    """The state of a tiny parameter in the place of each parameter."""
    if not parameters:
        return []
    tiny = [
        nn.Parameter(torch.ones(_SIDES[: parameter.dim()], dtype=parameter.dtype))
        for _, parameter in parameters
    ]
    optimizer = make([(name, stand_in) for (name, _), stand_in in zip(parameters, tiny, strict=True)])
    groups = {
        parameter: index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    kinds = [(groups[stand_in], stand_in.dim(), stand_in.dtype) for stand_in in tiny]
    # Those of one group with as many dimensions and the same dtype have the same state, so one of each kind is
    # updated. Optimizers create their state in the first update, and only for parameters with a gradient.
    updated = dict(zip(reversed(kinds), reversed(tiny), strict=True))
    for stand_in in updated.values():
        stand_in.grad = torch.ones_like(stand_in)
    optimizer.step()
    return [dict(optimizer.state[updated[kind]]) for kind in kinds]


def update_bytes(make: MakeOptimizer, parameters: Iterable[nn.Parameter], device: torch.device) -> list[int]:
    """For each parameter its share of what an update of all of them at once needs besides parameters and gradients.

    Optimizers compute in temporaries, and the first update creates their state. Foreach kernels, the default on most
    accelerators, have temporaries as large as all parameters together, so the trial runs on the device of the training.
    """

    @cache
    def factor(dtype: torch.dtype) -> float:
        return _update_factor(make, dtype, device)

    return [
        int(factor(parameter.dtype) * parameter.nbytes) if parameter.requires_grad else 0
        for parameter in parameters
    ]


def _update_factor(make: MakeOptimizer, dtype: torch.dtype, device: torch.device) -> float:
    parameter = nn.Parameter(torch.ones(_SIDE, _SIDE, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([("", parameter)])
    peaks: list[int] = []
    for _ in range(2):
        with LiveBytes() as live:
            optimizer.step()
        peaks.append(live.peak)
    return max(peaks) / int(parameter.nbytes)
