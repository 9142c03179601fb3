"""Recorded steps as a file that Perfetto and chrome://tracing open: Chrome's trace event format.

One row per partition, of what was measured and, below it, of the ideal step. Complete events (`X`) with microseconds
since recording began, metadata events (`M`) for names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who only reads a trace does not wait for torch
    from gpipe_cli.profiling.timeline import StepTimeline

__all__ = ["IDEAL", "MEASURED", "trace_events", "trace_text"]

MEASURED, IDEAL = 1, 2
"""The processes of a trace: what was recorded, and what was predicted."""
TITLES = {MEASURED: "gpipe", IDEAL: "gpipe, ideal"}


def trace_text(steps: Sequence[StepTimeline], ideal: StepTimeline, rows: Sequence[str]) -> str:
    """The content of the file; `rows` are the names of the partitions."""
    events = [*trace_events(steps, rows, MEASURED), *trace_events([ideal], rows, IDEAL)]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(document, separators=(",", ":"))


def trace_events(
    steps: Sequence[StepTimeline], rows: Sequence[str], process: int = MEASURED
) -> list[dict[str, Any]]:
    slices = (event for number, step in enumerate(steps) for event in _slices(number, step))
    return [{**event, "pid": process} for event in (*_names(rows, TITLES[process]), *slices)]


def _names(rows: Sequence[str], title: str) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, {"name": title})
    for index, name in enumerate(rows):
        yield _metadata("thread_name", index, {"name": name})
        yield _metadata("thread_sort_index", index, {"sort_index": index})


def _metadata(name: str, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "tid": row, "args": arguments}


def _slices(number: int, step: StepTimeline) -> Iterator[dict[str, Any]]:
    for piece in sorted(step.pieces, key=lambda piece: piece.begin):
        yield {
            "ph": "X",
            "name": piece.label,
            "cat": piece.phase,
            "tid": piece.action.partition,
            "ts": 1e6 * piece.begin,
            "dur": 1e6 * (piece.end - piece.begin),
            "args": {
                "step": number,
                "partition": piece.action.partition,
                "micro_batch": piece.action.micro_batch,
                "thread": piece.thread,
            },
        }
