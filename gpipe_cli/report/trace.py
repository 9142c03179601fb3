"""Recorded steps as a picture in plain characters, and as a trace file for Perfetto and chrome://tracing.

    0 F0--F1--F2--F3--            R0--B0------
    1     F0--F1--F2--F3--B0------B1------

One line per device, named by its partitions, time from left to right; on a terminal, every phase has its color.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.report.colors import ACTIONS
from gpipe_cli.report.tables import show

if TYPE_CHECKING:  # reading a trace needs no torch
    from gpipe_cli.profiling.timeline import StepTimeline
    from gpipe_cli.schedule.simulate import Span

DRAWN = ("forward", "recompute", "backward", "load", "drop")
"""Phases with a place in the picture; copies run beside them."""
PIPE_WIDTH = 100
MIN_WIDTH = 20
MEASURED, IDEAL = 1, 2
"""The processes of a trace: the recorded steps, and the predicted step."""
PROCESS_NAMES = {MEASURED: "gpipe", IDEAL: "gpipe, ideal"}


def print_step_timeline(title: str, step: StepTimeline, longest: float) -> None:
    """longest: the seconds that the whole width stands for, so that two pictures can be compared."""
    width = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    show(Text(title, style="bold"), *timeline_lines(step, width, longest))


def timeline_lines(step: StepTimeline, width: int, longest: float) -> list[Text]:
    """One line per device, at most `width` wide."""
    names = [",".join(map(str, lane)) for lane in step.lanes]
    widest = max(map(len, names))
    cells = max(MIN_WIDTH, width - widest - 1)
    lines = []
    for name, lane in zip(names, step.lanes, strict=True):
        own = [span for span in step.spans if span.action.partition in lane and span.phase in DRAWN]
        line = _line(own, lane, step.begin, cells / longest)
        lines.append(Text(f"{name.rjust(widest)} ").append_text(line))
    return lines


def _line(spans: Iterable[Span], lane: Sequence[int], origin: float, scale: float) -> Text:
    """A span that is too short for a cell gives way to the next one; those of every second partition are dim."""
    line = Text()
    for span in sorted(spans, key=lambda span: span.begin):
        begin, end = (round(scale * (moment - origin)) for moment in (span.begin, span.end))
        line.append(" " * max(0, begin - len(line)))
        room = end - len(line)
        style = ACTIONS[span.phase].terminal + (" dim" if lane.index(span.action.partition) % 2 else "")
        line.append(span.label.ljust(room, "-")[: max(0, room)], style=style)
    return line


def trace_json(steps: Sequence[StepTimeline], ideal: StepTimeline | None, rows: Sequence[str]) -> str:
    """The content of a trace file in Chrome's trace event format; `rows` are the names of the partitions."""
    events = trace_events(steps, rows, MEASURED)
    if ideal is not None:
        events += trace_events([ideal], rows, IDEAL)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def trace_events(
    steps: Sequence[StepTimeline], rows: Sequence[str], process: int = MEASURED
) -> list[dict[str, Any]]:
    """Metadata events (`M`) with the names, then complete events (`X`) in microseconds since recording began."""
    # A device has a row. Events of one row may not overlap, but accelerators copy while they compute: such copies get
    # rows of their own.
    lanes = steps[0].lanes
    lane_of = {partition: row for row, lane in enumerate(lanes) for partition in lane}
    copy_rows = len(lanes) if any(_copies_beside(step.spans) for step in steps) else 0
    names = [", ".join(rows[partition] for partition in lane) for lane in lanes] if rows else []
    names += [f"{name}, copies" for name in names] if copy_rows else []
    spans = (
        event
        for number, step in enumerate(steps)
        for event in _complete_events(number, step, lane_of, copy_rows)
    )
    return [{**event, "pid": process} for event in (*_name_events(names, PROCESS_NAMES[process]), *spans)]


def _copies_beside(spans: Iterable[Span]) -> bool:
    """Whether a partition copies while it computes."""
    by_partition = sorted(spans, key=lambda span: (span.action.partition, span.begin, span.end))
    return any(
        before.action.partition == after.action.partition and after.begin < before.end
        for before, after in pairwise(by_partition)
    )


def _name_events(rows: Sequence[str], process_name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": process_name}}
    for index, name in enumerate(rows):
        yield {"ph": "M", "name": "thread_name", "tid": index, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": index, "args": {"sort_index": index}}


def _complete_events(
    number: int, step: StepTimeline, lane_of: Mapping[int, int], copy_rows: int
) -> Iterator[dict[str, Any]]:
    """copy_rows: how many rows further down the copies of a device are."""
    for span in sorted(step.spans, key=lambda span: span.begin):
        yield {
            "ph": "X",
            "name": span.label,
            "cat": span.phase,
            "tid": lane_of[span.action.partition] + (copy_rows if span.phase == "copy" else 0),
            "ts": 1e6 * span.begin,
            "dur": 1e6 * (span.end - span.begin),
            "args": {
                "step": number,
                "lane": lane_of[span.action.partition],
                "partition": span.action.partition,
                "micro_batch": span.action.micro_batch,
                "thread": span.worker,
            },
        }
