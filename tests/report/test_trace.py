from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.profiling.timeline import StepTimeline, run_steps
from gpipe_cli.report.page.run_record import median_step
from gpipe_cli.report.trace import (
    IDEAL,
    MEASURED,
    print_step_timeline,
    timeline_lines,
    trace_events,
    trace_json,
)
from gpipe_cli.schedule.action import Action, Kind
from gpipe_cli.schedule.simulate import Span


def piece(kind: Kind, partition: int, micro_batch: int, begin: float, end: float, phase: str) -> Span:
    return Span(Action(kind, partition, micro_batch), partition, begin, end, phase)


STEP = StepTimeline(
    (
        piece(Kind.FORWARD, 0, 0, 1.0, 1.4, "forward"),
        piece(Kind.FORWARD, 0, 1, 1.4, 1.8, "forward"),
        piece(Kind.FORWARD, 0, 1, 1.8, 1.81, "copy"),
        piece(Kind.FORWARD, 1, 0, 1.4, 1.8, "forward"),
        piece(Kind.BACKWARD, 1, 0, 1.8, 2.4, "backward"),
        piece(Kind.BACKWARD, 0, 0, 2.0, 2.4, "recompute"),
        piece(Kind.BACKWARD, 0, 0, 2.4, 3.0, "backward"),
    )
)


def test_every_piece_stands_at_its_time_under_its_label() -> None:
    assert [line.plain for line in timeline_lines(STEP, width=42, longest=2.0)] == [
        "0 F0------F1------    R0------B0----------",
        "1         F0------B0----------",
    ]


@pytest.mark.parametrize("width", [1, 24, 37, 80, 200])
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    lines = timeline_lines(STEP, width, longest=2.0)
    assert all(len(line) <= max(22, width) for line in lines)
    assert lines[0].plain.startswith("0 F0")


def test_a_device_has_one_line_however_many_partitions_it_has() -> None:
    """A plan with interleaved partitions was drawn with 16 lines instead of 4."""
    spans = (
        Span(Action(Kind.FORWARD, partition, 0), partition % 2, partition, partition + 1, "forward")
        for partition in range(4)
    )
    step = StepTimeline(tuple(spans))
    assert [line.plain for line in timeline_lines(step, width=24, longest=4.0)] == [
        "0,2 F0---     F0---",
        "1,3      F0---     F0---",
    ]
    rows = [f"partition {index}" for index in range(4)]
    events = trace_events([step], rows)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["partition 0, partition 2", "partition 1, partition 3"]
    assert [event["tid"] for event in events if event["ph"] == "X"] == [0, 1, 0, 1]
    drawn = median_step(events, MEASURED, 0.5)
    assert drawn is not None and drawn.lanes == [[0, 2], [1, 3]]


def test_slices_that_come_and_go_keep_a_line_each() -> None:
    spans = [
        Span(Action(Kind.FORWARD, 0, 0), 7, 0, 1, "load"),
        Span(Action(Kind.FORWARD, 1, 0), 7, 1, 2, "load"),
    ]
    assert StepTimeline(tuple(spans)).lanes == [[0], [1]]


def test_two_pictures_share_a_scale() -> None:
    (line, _) = timeline_lines(STEP, width=42, longest=4.0)
    assert line.plain == "0 F0--F1--  R0--B0----"


def test_in_a_pipe_it_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_step_timeline("measured", STEP, longest=2.0)
    title, first, second = capsys.readouterr().out.splitlines()
    assert title == "measured" and first.startswith("0 F0-") and second.startswith("1  ")
    assert first.isascii() and "\x1b" not in first


Event = dict[str, Any]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with GPipe(module, [1, 2], devices=["cpu", "cpu"], chunks=2) as pipe:
        data = torch.randn(4, 8)
        steps = run_steps(pipe, partial(pipe.step, data, data, nn.functional.mse_loss), least=2)
    text = trace_json(steps, steps[0], ["partition 0 (cpu)", "partition 1 (cpu)"])

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    content: dict[str, Any] = json.loads(text.encode("ascii"), parse_constant=refuse)
    return content


def of_phase(document: dict[str, Any], phase: str) -> list[Event]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_the_document_is_what_the_format_asks_for(document: dict[str, Any]) -> None:
    assert document.keys() == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    fields: dict[str, Callable[[Any], bool]] = {
        "ph": lambda value: value in ("X", "M"),
        "name": lambda value: isinstance(value, str) and bool(value),
        "pid": lambda value: isinstance(value, int),
        "tid": lambda value: isinstance(value, int),
        "args": lambda value: isinstance(value, dict),
    }
    more: dict[str, Callable[[Any], bool]] = {
        "cat": lambda value: isinstance(value, str),
        "ts": lambda value: isinstance(value, float) and value >= 0,
        "dur": lambda value: isinstance(value, float) and value >= 0,
    }
    for event in document["traceEvents"]:
        expected = fields if event["ph"] == "M" else fields | more
        assert event.keys() == expected.keys()
        assert all(holds(event[name]) for name, holds in expected.items()), event


def test_there_is_one_named_row_per_partition(document: dict[str, Any]) -> None:
    names = {
        event["tid"]: event["args"] for event in of_phase(document, "M") if event["name"] == "thread_name"
    }
    assert names == {0: {"name": "partition 0 (cpu)"}, 1: {"name": "partition 1 (cpu)"}}
    assert {event["tid"] for event in of_phase(document, "X")} == {0, 1}


def test_slices_of_a_row_do_not_overlap_and_name_their_work(document: dict[str, Any]) -> None:
    for row in (0, 1):
        slices = [
            event for event in of_phase(document, "X") if (event["tid"], event["pid"]) == (row, MEASURED)
        ]
        # Microseconds as floats: two ends computed differently may be a rounding apart.
        assert all(
            earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-6 for earlier, later in pairwise(slices)
        )
        for number in (0, 1):
            of_step = [event for event in slices if event["args"]["step"] == number]
            computed = [event["name"] for event in of_step if event["cat"] != "copy"]
            assert computed == ["F0", "F1", "R0", "B0", "B1"]
            assert all(event["args"]["partition"] == row for event in of_step)
            assert len({event["args"]["thread"] for event in of_step}) == 1


def test_the_ideal_step_is_a_process_of_its_own(document: dict[str, Any]) -> None:
    ideal = [event for event in of_phase(document, "X") if event["pid"] == IDEAL]
    measured = [event for event in of_phase(document, "X") if event["pid"] == MEASURED]
    assert len(measured) == 2 * len(ideal) > 0
    names = {
        event["pid"]: event["args"]["name"]
        for event in of_phase(document, "M")
        if event["tid"] == 0 and event["name"] == "process_name"
    }
    assert names == {MEASURED: "gpipe", IDEAL: "gpipe, ideal"}


def test_copies_that_run_beside_the_computation_have_rows_of_their_own() -> None:
    beside = StepTimeline((*STEP.spans, piece(Kind.FORWARD, 0, 0, 1.4, 1.6, "copy")))
    events = trace_events([beside], ["partition 0 (cuda:0)", "partition 1 (cuda:1)"])
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows[2] == "partition 0 (cuda:0), copies" and len(rows) == 4
    copies = [event for event in events if event.get("cat") == "copy"]
    assert [event["tid"] for event in copies] == [2, 2] and {e["args"]["partition"] for e in copies} == {0}
