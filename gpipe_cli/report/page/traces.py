"""The timelines in a trace file: the median of the recorded steps, and the ideal one beside it.

Reads what `report.trace` writes; an event that is not of that kind is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpipe_cli.report.page.facts import Piece, Timeline
from gpipe_cli.report.page.files import mapping, number, rows, text, whole

__all__ = ["timeline"]

MOST_PARTITIONS = 1024
MOST_PIECES = 20_000
"""Of one step: a page with more would not be a picture."""


def timeline(document: Mapping[str, Any], process: int, bubble: float | None) -> Timeline | None:
    """The step of median length; None where there is none that can be drawn."""
    steps: dict[int, list[Piece]] = defaultdict(list)
    for event in rows(document.get("traceEvents")):
        if event.get("ph") == "X" and event.get("pid") == process:
            step, piece = _piece(event)
            if piece is not None:
                steps[step].append(piece)
    found = sorted((_from_zero(pieces) for pieces in steps.values()), key=lambda step: _length(step))
    median = found[len(found) // 2] if found else []
    return Timeline(tuple(median), bubble) if 0 < len(median) <= MOST_PIECES else None


def _piece(event: Mapping[str, Any]) -> tuple[int, Piece | None]:
    arguments = mapping(event.get("args"))
    partition = whole(arguments.get("partition"), MOST_PARTITIONS - 1)
    micro_batch = whole(arguments.get("micro_batch"), 10**9)
    begin, duration = number(event.get("ts")), number(event.get("dur"))
    step = whole(arguments.get("step"), 10**9) or 0
    if partition is None or micro_batch is None or begin is None or duration is None or duration < 0:
        return step, None
    label, phase = text(event.get("name")), text(event.get("cat"))
    return step, Piece(label, phase, partition, micro_batch, begin / 1000, duration / 1000)


def _from_zero(pieces: Sequence[Piece]) -> list[Piece]:
    origin = min(piece.begin for piece in pieces)
    moved = (replace(piece, begin=piece.begin - origin) for piece in pieces)
    return sorted(moved, key=lambda piece: (piece.partition, piece.begin))


def _length(pieces: Sequence[Piece]) -> float:
    return max(piece.begin + piece.milliseconds for piece in pieces)
