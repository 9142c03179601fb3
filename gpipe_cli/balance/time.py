"""Balance by time: measures every layer on this machine and makes the slowest partition as fast as possible.

Among balances that are as good to within 1 %, it takes the one with the shortest step under the chosen schedule. Where
measuring is impossible, or costs more than a short run could gain from it, the times are estimated from FLOPs. So are
those of layers for which the time to measure does not suffice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import overload

from torch import nn

from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.accelerator.devices import Device, device_here
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult, either_order, solve_within
from gpipe_cli.balance.solver import (
    Additive,
    AdditiveByPartition,
    FrozenStart,
    Objective,
    best_nearby,
    require_layers,
    sums,
)
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Value, moved, tensors_of
from gpipe_cli.profiling.layer_times import MAX_RUNS, estimated_times, most_runs
from gpipe_cli.profiling.profile_cache import ProfileCache
from gpipe_cli.profiling.records import FLOPS, LayerTimes, Sample, frozen_layers, has_values
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

MEASURED_SHARE = 0.05
"""Measuring runs at most this share of the micro-batches that the run trains."""
LEAST_RUNS = 8
"""So many and a few to warm up: a shorter measurement says too little."""
AS_GOOD = 1.01
SIMULATED_ACTIONS = 200_000
"""For all balances compared: under a second."""


def balance(
    module: nn.Sequential,
    sample: Sample,
    partitions: int,
    spec: PipelineSpec | None = None,
    within: MemoryObjective | None = None,
    profiles: ProfileCache | None = None,
    seconds: float = 3.0,
    cache: bool = True,
    measure: str = "always",
    trained_micro_batches: int | None = None,
) -> BalanceResult:
    """`seconds` is how long measuring may take altogether, or 0 for one run of each layer, however long it takes.

    `profiles` may have the times already. With measure="auto" a module without values, or a run of too few
    `trained_micro_batches` to gain from a measurement, gets estimated times; without a number of them the run is long.
    """
    if measure not in ("auto", "always"):
        raise ConfigError(f"balance.measure={measure}: must be auto or always")
    require_layers(len(module), partitions)
    usable = profiles if profiles is not None else ProfileCache(None)
    usable.allow(seconds)
    worthwhile = MAX_RUNS if measure == "always" else measured_runs(trained_micro_batches)
    runs = min(worthwhile, most_runs(seconds))
    layers: Sequence[LayerTimes] | None = None
    if cache:
        layers = usable.stored_times(module, sample, seconds, runs)
    if layers is None and measure == "always":
        layers = usable.measured_times(module, sample, seconds, runs)
    elif layers is None:
        reason = "the run is too short to gain from a measurement" if worthwhile < LEAST_RUNS else ""
        layers = _measured_or_estimated(usable, module, sample, seconds, runs, reason)
    spec = spec or PipelineSpec("gpipe", partitions, micro_batches=1)
    return balance_times(layers, spec, frozen_layers(module, sample), within)


def measured_runs(trained: int | None) -> int:
    """How often the layers run to be measured for so many trained micro-batches; fewer than `LEAST_RUNS`: never."""
    return MAX_RUNS if trained is None else min(MAX_RUNS, int(MEASURED_SHARE * trained))


def balance_times(
    layers: Sequence[LayerTimes],
    spec: PipelineSpec,
    frozen: int = 0,
    within: MemoryObjective | None = None,
) -> BalanceResult:
    """The best balance of layers whose times are known; the first `frozen` of them need no backward."""
    objective = _objective(layers, spec, frozen)
    solution = solve_within(objective, spec.partitions, within)

    def as_good(balance: Sequence[int]) -> bool:
        return max(sums(objective, balance)) <= AS_GOOD * solution.largest and (
            within is None or within.fits(balance)
        )

    # The solver only bounds the slowest partition. Of balances about as good, the simulator finds the shortest step.
    chosen = best_nearby(
        tuple(solution.balance),
        as_good,
        lambda balance: spec.simulate(partition_costs(layers, balance, frozen)).step,
        budget=max(1, SIMULATED_ACTIONS // sum(map(len, spec.order))),
    )
    costs = layer_costs(layers, statistics.fmean(spec.checkpointed_counts) / spec.micro_batches)
    # Without any measured layer, the times are what they would be estimated from.
    unit = layers[0].source if all(layer.is_work for layer in layers) else "ms"
    return replace(BalanceResult.of(chosen, costs, unit, solution.largest, objective), phases=layers)


def _measured_or_estimated(
    profiles: ProfileCache, module: nn.Sequential, sample: Sample, seconds: float, runs: int, reason: str
) -> Sequence[LayerTimes]:
    if not reason and not has_values(module):
        reason = "this process has no values of the parameters"
    if not reason:
        try:
            return profiles.measured_times(module, sample, seconds, runs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = "the whole model does not fit on one device"
    layers = estimated_times(module, sample)
    profiles.origin = (
        f"estimated from FLOPs, since {reason}; balance.measure=always measures the layers"
        if layers[0].source == FLOPS
        else f"the same cost for every layer, since {reason} and their FLOPs cannot be counted"
    )
    return layers


def _objective(layers: Sequence[LayerTimes], spec: PipelineSpec, frozen: int) -> Objective:
    """The cost of a layer depends on its partition if partitions do not all recompute as much."""
    recomputing = _recomputing_objective(layers, spec)
    return FrozenStart(Additive(layer_costs(layers, 0)), recomputing, frozen) if frozen else recomputing


def _recomputing_objective(layers: Sequence[LayerTimes], spec: PipelineSpec) -> Objective:
    by_stop = {
        stop: Additive(layer_costs(layers, stop / spec.micro_batches))
        for stop in set(spec.checkpointed_counts)
    }
    if len(by_stop) == 1:
        return by_stop[spec.checkpointed_counts[0]]
    return AdditiveByPartition([by_stop[stop] for stop in spec.checkpointed_counts])


def layer_costs(layers: Sequence[LayerTimes], recomputed: float) -> list[float]:
    """Milliseconds of each layer for one micro-batch, if this share of the micro-batches is recomputed."""
    return [layer.forward_ms * (1 + recomputed) + layer.backward_ms for layer in layers]


def partition_costs(
    layers: Sequence[LayerTimes], balance: Sequence[int], frozen: int = 0
) -> list[PartitionCost]:
    """For the simulator; a recomputation counts as another forward, and the first `frozen` layers need none."""
    costs = []
    for end, length in zip(accumulate(balance), balance, strict=True):
        part = layers[end - length : end]
        forward = sum(layer.forward_ms for layer in part)
        backward = sum(layer.backward_ms for layer in part)
        costs.append(PartitionCost(forward, backward, recompute=forward if end > frozen else 0.0))
    return costs


@overload
def balance_by_time(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]: ...
@overload
def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]: ...
@either_order(
    chunks="give one micro-batch as the sample",
    param_scale="time does not depend on the optimizer; remove it, or use balance_by_size",
)
def balance_by_time(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Layers per partition for `GPipe`, from `timeout` seconds of measuring with `sample`, a micro-batch.

    Also in the order of torchgpipe 0.0.6 and later: `balance_by_time(partitions, module, sample)`. `device` is where
    the layers are measured; by default that is where the sample is (torchgpipe's default is the current GPU).
    """
    place = tensors_of(sample)[0].device if device is None else device_here(device)
    return balance(module, Sample(moved(sample, place)), partitions, seconds=timeout).layers
