from __future__ import annotations

import pytest

from gpipe_cli.profiling.action_recorder import Piece
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.timeline import picture, print_picture
from gpipe_cli.schedule.action import Action, Kind


def piece(kind: Kind, partition: int, micro_batch: int, begin: float, end: float, phase: str) -> Piece:
    return Piece(Action(kind, partition, micro_batch), phase, begin, end, thread=partition)


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
    assert [line.plain for line in picture(STEP, 2, width=42, longest=2.0)] == [
        "0 F0------F1------    R0------B0----------",
        "1         F0------B0----------",
    ]


@pytest.mark.parametrize("width", [1, 24, 37, 80, 200])
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    lines = picture(STEP, 2, width, longest=2.0)
    assert all(len(line) <= max(22, width) for line in lines)
    assert lines[0].plain.startswith("0 F0")


def test_two_pictures_share_a_scale() -> None:
    (line, _) = picture(STEP, 2, width=42, longest=4.0)
    assert line.plain == "0 F0--F1--  R0--B0----"


def test_in_a_pipe_it_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_picture("measured", STEP, 2, longest=2.0)
    title, first, second = capsys.readouterr().out.splitlines()
    assert title == "measured" and first.startswith("0 F0-") and second.startswith("1  ")
    assert first.isascii() and "\x1b" not in first
