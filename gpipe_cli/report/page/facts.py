"""What a report page is made from. A part that is not known is empty or None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final


@final
@dataclass(frozen=True)
class MetricCurve:
    """One metric of one split over the steps of a run."""

    metric: str
    split: str
    points: tuple[tuple[float, float], ...]
    """Step and value, by step."""


@final
@dataclass(frozen=True)
class TimelineBar:
    """One action of one partition, in milliseconds since its step began."""

    label: str
    phase: str
    partition: int
    micro_batch: int
    begin: float
    milliseconds: float


@final
@dataclass(frozen=True)
class TimelineFacts:
    bars: tuple[TimelineBar, ...]
    bubble: float | None = None
    """The share of all workers' time in which they are idle."""

    @property
    def milliseconds(self) -> float:
        return max(bar.begin + bar.milliseconds for bar in self.bars)

    @property
    def partitions(self) -> int:
        return 1 + max(bar.partition for bar in self.bars)


@final
@dataclass(frozen=True)
class LayerCost:
    name: str
    type: str
    partition: int
    forward: float
    backward: float
    """Milliseconds, or FLOPs if nothing was run."""
    parameter_bytes: float
    saved_bytes: float


@final
@dataclass(frozen=True)
class PartitionUsage:
    device: str = ""
    layers: str = ""
    """How many, and the names of the first and the last."""
    parameters: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes by purpose."""
    busy: float | None = None
    recompute: float | None = None
    waiting_ms: float | None = None


@final
@dataclass(frozen=True)
class RunFacts:
    """The facts of one run directory."""

    path: Path
    command: str = "train"
    """The gpipe command that made it."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    curves: tuple[MetricCurve, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    unit: str = "ms"
    """Of the layers' costs: ms or flops."""
    measured: TimelineFacts | None = None
    ideal: TimelineFacts | None = None
    advice: tuple[str, ...] = ()
    partitions: tuple[PartitionUsage, ...] = ()
    device_memory: float | None = None
    """The limit in bytes that was configured."""
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """The commands that made it, in this order."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """What you can do with the run, each purpose with its command."""
    problems: tuple[str, ...] = ()
    """What is wrong with its files."""
