"""A plan with its predicted time and memory, what limits it, and what to try.

What limits a plan follows from what its step would be without transfers, with even partitions or without a bubble: the
change that would shorten the step most names the limit.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any, final

from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.search import PlanShape, RankedPlan
from gpipe_cli.plan.step_time import simulated_step
from gpipe_cli.profiling.memory import PartitionMemory
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.values import exact_bytes

SINGLE, THREADS, OFFLOAD = "single", "threads", "offload"
"""The engines that plans are for: without a pipeline, a pipeline, and a model in slices on one device."""
SMALL = 0.02
"""A share of the step that is not worth mentioning."""
LARGE_ERROR = 0.15
"""The share of a measured step beyond which predictions of others cannot be relied on."""
HINTS = {
    "slowest partition": (
        "the slowest partition holds the others up: a model cut into finer layers could be divided more evenly"
    ),
    "bubble": (
        "workers wait for the first micro-batch to arrive and the last to return: a larger batch_size with more "
        "chunks, or fewer partitions, shortens that"
    ),
    "transfers": "tensors on their way between devices hold it up: cut where less crosses, or use a faster link",
    "update": (
        "the sum of gradients over replicas and the optimizer's update hold it up: a larger batch_size makes them rarer"
    ),
    "host": (
        "one Python process launches the kernels of all devices: larger micro-batches have fewer of them, and "
        "engine=processes has a process for each device"
    ),
    "memory": "the memory limit holds it up: a larger device_memory or a smaller batch_size makes it quicker",
    "work": "devices are busy almost all the time: only faster devices, or more of them, make it quicker",
}
HINTS_OF_ANY_BATCH_SIZE = {
    "bubble": (
        "workers wait for the first micro-batch to arrive and the last to return: fewer partitions shorten that"
    ),
    "memory": "the memory limit holds it up: a larger device_memory makes it quicker",
    "update": "the sum of gradients over replicas and the optimizer's update hold it up",
}
"""Where the batch size is part of the plan, so that no other one is better."""


@final
@dataclass(frozen=True)
class Limit:
    name: str
    """slowest partition, bubble, memory, transfers, update, host, or work: devices are busy almost all the time."""
    share: float
    """By this share the step would be shorter without it."""
    shares: Mapping[str, float]
    """The share by which the step would be shorter without each thing that could be the limit."""


@final
@dataclass(frozen=True)
class Prediction:
    shape: PlanShape
    balance: tuple[int, ...]
    step_ms: float
    lower_bound_ms: float
    """A lower bound of the step's time for any balance of this shape."""
    bubble: float
    batch_size: int
    memory: tuple[PartitionMemory, ...]
    """The memory of each device."""
    limit: Limit
    engine: str
    engine_memory: int | None = None
    """The limit of the slices of engine=offload, whose layers `balance` then counts."""
    devices: tuple[str, ...] = ()
    """The devices that a command to train must name; none if the default is what they are."""
    device_memory: int | None = None
    """The limit of memory of its devices, if there is one."""
    chose_batch_size: bool = False
    """Whether the batch size is part of the plan, rather than given."""
    spread: float = 0.0
    """By what share the measurements behind the prediction, or the measured steps, differ; 0 for an estimate."""
    parts: tuple[PartitionCost, ...] = ()
    """What each partition costs."""
    measured_ms: float | None = None

    @property
    def samples_per_second(self) -> float:
        """As measured, or else as predicted."""
        step_ms = self.step_ms if self.measured_ms is None else self.measured_ms
        return 1000 * self.batch_size / step_ms if step_ms else 0.0

    @property
    def peak_bytes(self) -> int:
        return max(device.total_bytes for device in self.memory)

    @property
    def is_plain(self) -> bool:
        """Whether this is training without a pipeline."""
        return self.engine == SINGLE

    @property
    def error(self) -> float | None:
        """The error of the prediction as a share of the measured step."""
        return None if self.measured_ms is None else self.step_ms / self.measured_ms - 1

    @property
    def checkpoint(self) -> str | list[str]:
        """As the configuration has it."""
        given = self.shape.checkpoint
        return given if isinstance(given, str) else list(given)

    @property
    def overrides(self) -> str:
        """The arguments for `gpipe train`."""
        batch_size = self._batch_size_override
        devices = f" 'devices=[{','.join(self.devices)}]'" if self.devices else ""
        if self.is_plain:
            return f"{batch_size}engine=single chunks={self.shape.chunks}{devices}"
        if self.engine_memory is not None:
            return (
                f"{batch_size}engine=offload engine.memory={exact_bytes(self.engine_memory)} "
                f"chunks={self.shape.chunks} "
                f"checkpoint={self.checkpoint}"
            )
        if not devices and self.shape.partitions != self.shape.devices:
            devices = f" devices={self.shape.devices}"
        return f"{batch_size}{self._pipeline_overrides}{devices}"

    @property
    def replica_overrides(self) -> str:
        """The overrides for one of several replicas, without the devices."""
        return f"{self._batch_size_override}{self._pipeline_overrides}"

    @property
    def _batch_size_override(self) -> str:
        return f"batch_size={self.batch_size} " if self.chose_batch_size else ""

    @property
    def _pipeline_overrides(self) -> str:
        layers = ",".join(map(str, self.balance))
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else f"[{','.join(self.checkpoint)}]"
        # Training searches for the order again, and must keep to the same limit.
        is_searched = isinstance(self.shape.schedule, FixedOrder)
        memory = is_searched and self.device_memory
        words = ["balance=manual", f"balance.layers=[{layers}]", f"chunks={self.shape.chunks}"]
        words += [f"schedule={self.shape.schedule_name}", f"checkpoint={checkpoint}"]
        return shlex.join([*words, *([f"device_memory={exact_bytes(memory)}"] if memory else [])])

    def slower_than(self, other: Prediction) -> float:
        """How many times as long a sample takes: as measured if both are, else as predicted."""
        step_ms, other_ms = self.step_ms, other.step_ms
        if self.measured_ms is not None and other.measured_ms is not None:
            step_ms, other_ms = self.measured_ms, other.measured_ms
        return step_ms / self.batch_size / (other_ms / other.batch_size)

    def is_faster_than(self, other: Prediction) -> bool:
        """By more than the measurements differ."""
        return other.slower_than(self) - 1 > max(self.spread, other.spread)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "balance": list(self.balance),
            "chunks": self.shape.chunks,
            "schedule": self.shape.schedule_name,
            "checkpoint": self.checkpoint,
            "devices": self.shape.devices,
            "engine": self.engine,
            "batch_size": self.batch_size,
            "predicted_ms": self.step_ms,
            "predicted_peak_bytes": self.peak_bytes,
            "samples_per_second": self.samples_per_second,
            "bubble": self.bubble,
            "lower_bound_ms": self.lower_bound_ms,
            "memory": [{**asdict(device), "total_bytes": device.total_bytes} for device in self.memory],
            "spread": self.spread if isfinite(self.spread) else None,
            "limit": self.limit.name,
            "limit_share": self.limit.share,
            "limits": dict(self.limit.shares),
            "overrides": self.overrides,
            "paste": self.overrides,  # its former name, for one release
            **({} if self.measured_ms is None else {"measured_ms": self.measured_ms, "error": self.error}),
        }


def predict(
    plan: RankedPlan,
    costs: LayerCosts,
    memory: Sequence[PartitionMemory],
    *,
    cores: int | None,
    batch_size: int,
    without_limit_ms: float | None = None,
) -> Prediction:
    """`memory` is that of each partition; `without_limit_ms` is the best step if memory were unlimited."""
    shape, best = plan.shape, plan.best
    spec = shape.spec(cores)
    parts = costs.partitions(best.balance, spec)
    work = _work(spec, parts)
    update_ms = costs.update_ms(best.balance, spec)
    pipeline_ms = best.step_ms - update_ms
    busy = work / (shape.devices * pipeline_ms) if pipeline_ms else 1.0
    at_once = min(shape.devices, cores or shape.devices)
    return Prediction(
        shape,
        best.balance,
        best.step_ms,
        best.lower_bound_ms,
        bubble=max(0.0, 1 - busy),
        batch_size=batch_size,
        memory=_by_device(memory, spec.traits.placement(shape.partitions, shape.devices)),
        limit=limit_of(
            spec,
            parts,
            best.step_ms,
            work / at_once,
            without_limit_ms,
            update_ms=update_ms,
            host_ms=costs.host_ms(best.balance, spec),
        ),
        engine=SINGLE if shape.is_plain else THREADS,
        spread=costs.spread,
        parts=tuple(parts),
    )


def limit_of(
    spec: PipelineSpec,
    parts: Sequence[PartitionCost],
    step_ms: float,
    work_ms: float,
    without_limit_ms: float | None,
    update_ms: float = 0.0,
    host_ms: float = 0.0,
) -> Limit:
    """`work_ms` is the step in which every device, or core, is always busy; `update_ms` comes after its end.

    `host_ms` is how long one process needs to launch everything.
    """
    without_transfer = [replace(part, transfer=0.0) for part in parts]
    equal = [_mean(without_transfer, spec)] * len(parts)
    without_transfers = simulated_step(spec, without_transfer)
    even = min(without_transfers, simulated_step(replace(spec, checkpoint="always"), equal))
    # Each removes one more cause than the entry before it, so the first five shares add up to the step without its
    # work.
    shares = {
        "update": update_ms,
        "host": max(0.0, host_ms - simulated_step(spec, parts)),
        "transfers": simulated_step(spec, parts) - without_transfers,
        "slowest partition": without_transfers - even,
        "bubble": even - work_ms,
        "memory": 0.0 if without_limit_ms is None else step_ms - without_limit_ms,
    }
    name = max(shares, key=shares.__getitem__)
    of_step = {cause: max(0.0, ms / step_ms if step_ms else 0.0) for cause, ms in shares.items()}
    share = of_step[name]
    return Limit(name, share, of_step) if share > SMALL else Limit("work", 0.0, of_step)


def _work(spec: PipelineSpec, parts: Sequence[PartitionCost]) -> float:
    """The work of all devices together."""
    if isinstance(spec.schedule, FixedOrder):  # some of its backwards may be split, and some whole
        simulation = spec.simulate(parts)
        return (1 - simulation.bubble) * len(spec.order) * simulation.step
    splits = spec.traits.splits_backward
    return sum(
        spec.micro_batches * (part.forward + (sum(part.split) if splits else part.backward))
        + stop * part.recompute
        for part, stop in zip(parts, spec.checkpointed_counts, strict=True)
    )


def _mean(parts: Sequence[PartitionCost], spec: PipelineSpec) -> PartitionCost:
    """A partition that always recomputes, but no more than all of them do together."""
    count = len(parts)
    recomputed = sum(
        stop * part.recompute for stop, part in zip(spec.checkpointed_counts, parts, strict=True)
    )
    return PartitionCost(
        sum(part.forward for part in parts) / count,
        sum(part.backward for part in parts) / count,
        recompute=recomputed / spec.micro_batches / count,
        input_grad=sum(part.split[0] for part in parts) / count,
        weight_grad=sum(part.split[1] for part in parts) / count,
    )


def _by_device(memory: Sequence[PartitionMemory], workers: Sequence[int]) -> tuple[PartitionMemory, ...]:
    """workers: the device of each partition by its index."""
    return tuple(
        PartitionMemory(
            *(
                sum(
                    getattr(partition, name)
                    for partition, worker in zip(memory, workers, strict=True)
                    if worker == device
                )
                for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
            )
        )
        for device in range(max(workers) + 1)
    )


def best_and_plain(plans: Sequence[Prediction], keep: int) -> list[Prediction]:
    """The first `keep` plans, and the first without a pipeline, which all others are compared with."""
    plain = _plain(plans)
    return [plan for place, plan in enumerate(plans) if place < keep or plan is plain]


def preferring(plan: Prediction | None, plans: Sequence[Prediction]) -> list[Prediction]:
    """`plans` with this one in front, if it is among them and the first is not measurably faster."""
    if plan is None or plan not in plans or plans[0].is_faster_than(plan):
        return list(plans)
    return [plan, *(other for other in plans if other is not plan)]


def by_recommendation(plans: Sequence[Prediction]) -> list[Prediction]:
    """Those that were run in front, by measured time; but no pipeline before a plain run that is as fast."""
    measured = [plan for plan in plans if plan.measured_ms is not None]
    measured.sort(key=lambda plan: -plan.samples_per_second)
    ordered = [*measured, *(plan for plan in plans if plan.measured_ms is None)]
    return preferring(_plain(ordered), ordered)


def _plain(plans: Sequence[Prediction]) -> Prediction | None:
    return next((plan for plan in plans if plan.is_plain), None)


def advice(plans: Sequence[Prediction]) -> str:
    """A sentence about the best plan. `plans` has the best first, and the plain run among them if it was judged."""
    best, plain = plans[0], _plain(plans)
    if best.engine == OFFLOAD:
        return (
            f"no pipeline fits: engine=offload keeps {len(best.balance)} slices of the model in host memory"
            + (", and copying them takes longer than computing" if best.limit.name == "transfers" else "")
        )
    hints = HINTS | HINTS_OF_ANY_BATCH_SIZE if best.chose_batch_size else HINTS
    if best.is_plain:
        found = _against_pipelines(best, plans)
    elif plain is None:
        found = f"{hints[best.limit.name]}{_give_or_take(best)}"
    else:
        found = f"{_gain(best, plain)}; {hints[best.limit.name]}"
    worst = max((abs(plan.error) for plan in plans if plan.error is not None), default=0.0)
    if worst > max(LARGE_ERROR, best.spread):
        found += f"; the predictions were wrong by up to {percent(worst)}, so plans that were not run may be faster"
    return found


def _against_pipelines(plain: Prediction, plans: Sequence[Prediction]) -> str:
    pipelines = [plan for plan in plans if plan.shape.devices > 1 and plan.engine == THREADS]
    if not pipelines:
        return "train without a pipeline; there was none to compare it with"
    best = min(pipelines, key=lambda plan: plan.slower_than(plain))
    spread, ratio = max(best.spread, plain.spread), best.slower_than(plain)
    if spread == inf:
        return "train without a pipeline: the time did not suffice to measure how much faster one is"
    if ratio - 1 <= spread:
        return (
            "no measurable gain; train without a pipeline: the best pipeline differs from it by "
            f"{percent(abs(ratio - 1))}, and measurements of the same by {percent(spread)}"
        )
    return (
        f"train without a pipeline: one device is quickest here, a pipeline takes {ratio:.2f} times as long"
    )


def _gain(best: Prediction, plain: Prediction) -> str:
    gain, devices = plain.slower_than(best), best.shape.devices
    if gain <= devices:
        return f"{gain:.2f} times as fast as without a pipeline{_give_or_take(best, plain)}"
    if best.spread:
        return (
            "the times disagree: they promise more than the devices can give; run it again when nothing else runs "
            "here"
        )
    return "faster than without a pipeline, which uses the first device only"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _give_or_take(*plans: Prediction) -> str:
    """The uncertainty of a statement about these plans; nothing for estimates, whose title says what they are."""
    spread = max(plan.spread for plan in plans)
    if spread == inf:
        return " (the time did not suffice to measure how certain this is)"
    are = "measured" if all(plan.measured_ms is not None for plan in plans) else "predicted"
    return f" ({are}; measurements of the same differ by {percent(spread)})" if spread else ""
