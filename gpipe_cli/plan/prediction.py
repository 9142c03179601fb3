"""A plan with what it will take: time, memory, what limits it, and what to try. Pure Python but for its memory.

Decides what limits a plan by asking what its step would be without transfers, with even partitions, without a bubble:
whatever would shorten it most is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from gpipe_cli.plan.costs import Costs
from gpipe_cli.plan.search import Answer
from gpipe_cli.plan.shape import Shape
from gpipe_cli.plan.steps import simulated
from gpipe_cli.profiling.partition_memory import PartitionMemory
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["Limit", "Prediction", "limit_of", "predict"]

SMALL = 0.02
"""A share of the step that is not worth a word."""


@final
@dataclass(frozen=True)
class Limit:
    name: str
    """slowest partition, bubble, memory, transfers, or work: there is simply much to do."""
    share: float
    """Of the step, which would be that much shorter without it."""


@final
@dataclass(frozen=True)
class Prediction:
    shape: Shape
    balance: tuple[int, ...]
    step_ms: float
    lower_bound_ms: float
    """Of any balance of this shape."""
    bubble: float
    samples_per_second: float
    memory: tuple[PartitionMemory, ...]
    """Of each device."""
    limit: Limit
    measured_ms: float | None = None

    @property
    def peak_bytes(self) -> int:
        return max(one.total_bytes for one in self.memory)

    @property
    def is_plain(self) -> bool:
        """Whether this is training without a pipeline."""
        return self.shape.devices == 1 and self.shape.checkpoint == "never"

    @property
    def error(self) -> float | None:
        """How far off the prediction was, as a share of what was measured."""
        return None if self.measured_ms is None else self.step_ms / self.measured_ms - 1

    @property
    def checkpoint(self) -> str | list[str]:
        """As the key of the configuration."""
        given = self.shape.checkpoint
        return given if isinstance(given, str) else list(given)

    @property
    def overrides(self) -> str:
        """What to give to gpipe train."""
        if self.is_plain:
            return f"engine=single chunks={self.shape.chunks}"
        layers = ",".join(map(str, self.balance))
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else f"[{','.join(self.checkpoint)}]"
        devices = "" if self.shape.partitions == self.shape.devices else f" devices={self.shape.devices}"
        return (
            f"balance=manual balance.layers=[{layers}] chunks={self.shape.chunks} "
            f"schedule={self.shape.schedule} checkpoint={checkpoint}{devices}"
        )

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "balance": list(self.balance),
            "chunks": self.shape.chunks,
            "schedule": self.shape.schedule,
            "checkpoint": self.checkpoint,
            "devices": self.shape.devices,
            "engine": "single" if self.is_plain else "threads",
            "predicted_ms": self.step_ms,
            "predicted_peak_bytes": self.peak_bytes,
            "samples_per_second": self.samples_per_second,
            "bubble": self.bubble,
            "lower_bound_ms": self.lower_bound_ms,
            "memory": [{**asdict(one), "total_bytes": one.total_bytes} for one in self.memory],
            "limit": self.limit.name,
            "limit_share": self.limit.share,
            "paste": self.overrides,
            **({} if self.measured_ms is None else {"measured_ms": self.measured_ms, "error": self.error}),
        }


def predict(
    answer: Answer,
    costs: Costs,
    memory: Sequence[PartitionMemory],
    *,
    cores: int | None,
    rows: int,
    without_limit_ms: float | None = None,
) -> Prediction:
    """`memory` is each partition's; `without_limit_ms` is the best step if memory did not matter."""
    shape, found = answer.shape, answer.found
    spec = shape.spec(cores)
    parts = costs.partitions(found.balance, spec)
    work = _work(spec, parts)
    busy = work / (shape.devices * found.step_ms) if found.step_ms else 1.0
    at_once = min(shape.devices, cores or shape.devices)
    return Prediction(
        shape,
        found.balance,
        found.step_ms,
        found.lower_bound_ms,
        bubble=max(0.0, 1 - busy),
        samples_per_second=1000 * rows / found.step_ms if found.step_ms else 0.0,
        memory=_by_device(memory, shape.devices),
        limit=limit_of(spec, parts, found.step_ms, work / at_once, without_limit_ms),
    )


def limit_of(
    spec: PipelineSpec,
    parts: Sequence[PartitionCost],
    step_ms: float,
    work_ms: float,
    without_limit_ms: float | None,
) -> Limit:
    """`work_ms` is the step in which every device, or core, is always busy."""
    still = [replace(one, transfer=0.0) for one in parts]
    alike = [_mean(still, spec)] * len(still)
    without_transfers = simulated(spec, still)
    even = min(without_transfers, simulated(replace(spec, checkpoint="always"), alike))
    shares = {
        "transfers": step_ms - without_transfers,
        "slowest partition": without_transfers - even,
        "bubble": even - work_ms,
        "memory": 0.0 if without_limit_ms is None else step_ms - without_limit_ms,
    }
    name = max(shares, key=shares.__getitem__)
    share = shares[name] / step_ms if step_ms else 0.0
    return Limit(name, share) if share > SMALL else Limit("work", 0.0)


def _work(spec: PipelineSpec, parts: Sequence[PartitionCost]) -> float:
    """Of all devices together."""
    splits = spec.traits.splits_backward
    return sum(
        spec.micro_batches * (one.forward + (sum(one.split) if splits else one.backward))
        + stop * one.recompute
        for one, stop in zip(parts, spec.checkpoint_stops, strict=True)
    )


def _mean(parts: Sequence[PartitionCost], spec: PipelineSpec) -> PartitionCost:
    """A partition that always recomputes, but no more than all of them do together."""
    count = len(parts)
    recomputed = sum(stop * one.recompute for stop, one in zip(spec.checkpoint_stops, parts, strict=True))
    return PartitionCost(
        sum(one.forward for one in parts) / count,
        sum(one.backward for one in parts) / count,
        recompute=recomputed / spec.micro_batches / count,
        input_grad=sum(one.split[0] for one in parts) / count,
        weight_grad=sum(one.split[1] for one in parts) / count,
    )


def _by_device(memory: Sequence[PartitionMemory], devices: int) -> tuple[PartitionMemory, ...]:
    """Partitions are dealt to devices in turn."""
    return tuple(
        PartitionMemory(
            *(
                sum(getattr(one, name) for one in memory[device::devices])
                for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
            )
        )
        for device in range(devices)
    )
