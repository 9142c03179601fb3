"""What a page is made from, in the page's own words: curves, timelines, layers, partitions.

Records only. Where they come from is the matter of `reading`; a part that is not known is empty or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

__all__ = ["Curve", "Layer", "Partition", "Piece", "Run", "Timeline"]


@final
@dataclass(frozen=True)
class Curve:
    """One quantity of one split over the steps of a run."""

    quantity: str
    split: str
    points: tuple[tuple[float, float], ...]
    """Step and value, by step."""


@final
@dataclass(frozen=True)
class Piece:
    """A piece of work of one partition, in milliseconds since its step began."""

    label: str
    phase: str
    partition: int
    micro_batch: int
    begin: float
    milliseconds: float


@final
@dataclass(frozen=True)
class Timeline:
    """One step."""

    pieces: tuple[Piece, ...]
    bubble: float | None = None
    """The share of all workers' time in which they do nothing."""

    @property
    def milliseconds(self) -> float:
        return max(piece.begin + piece.milliseconds for piece in self.pieces)

    @property
    def partitions(self) -> int:
        return 1 + max(piece.partition for piece in self.pieces)


@final
@dataclass(frozen=True)
class Layer:
    name: str
    type: str
    partition: int
    forward: float
    backward: float
    """Milliseconds, or floating-point operations where nothing was run."""
    parameter_bytes: float
    saved_bytes: float


@final
@dataclass(frozen=True)
class Partition:
    """What is known of one: `memory` is in bytes, by what they are for."""

    device: str = ""
    layers: str = ""
    """How many, from which to which."""
    parameters: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    busy: float | None = None
    recompute: float | None = None
    waiting_ms: float | None = None


@final
@dataclass(frozen=True)
class Run:
    """The facts of one run directory."""

    path: Path
    command: str = "train"
    """The word after `gpipe` that made it."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    layers: tuple[Layer, ...] = ()
    unit: str = "ms"
    """Of the layers' costs."""
    measured: Timeline | None = None
    ideal: Timeline | None = None
    advice: tuple[str, ...] = ()
    partitions: tuple[Partition, ...] = ()
    device_memory: float | None = None
    """The limit in bytes that was asked for."""
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """What was typed to make it, in this order."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """What can be done with it, each with its purpose."""
    notes: tuple[str, ...] = ()
    """What is wrong with its files."""
