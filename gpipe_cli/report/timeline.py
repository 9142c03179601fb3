"""A step as a picture: a line per partition, time from left to right, every piece of work under its label.

    0 F0--F1--F2--F3--            R0--B0------
    1     F0--F1--F2--F3--B0------B1------

Plain characters that any terminal and any pipe can show; on a terminal phases have colours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from gpipe_cli.profiling.action_recorder import Piece
from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.tables import show

__all__ = ["picture", "print_picture"]

STYLES = {
    "forward": "blue",
    "recompute": "yellow",
    "backward": "green",
    "load": "magenta",
    "drop": "magenta",
}
IN_A_PIPE = 100
LEAST = 20


def print_picture(title: str, step: StepTimeline, partitions: int, longest: float) -> None:
    """`longest` is what the whole width stands for, so that two pictures can be compared."""
    width = Console().width if sys.stdout.isatty() else IN_A_PIPE
    show(Text(title, style="bold"), *picture(step, partitions, width, longest))


def picture(step: StepTimeline, partitions: int, width: int, longest: float) -> list[Text]:
    """One line per partition, at most `width` wide."""
    names = [str(index).rjust(len(str(partitions - 1))) for index in range(partitions)]
    cells = max(LEAST, width - len(names[0]) - 1)
    lines = []
    for index, name in enumerate(names):
        own = [piece for piece in step.pieces if piece.action.partition == index and piece.phase in STYLES]
        lines.append(Text(f"{name} ").append_text(_line(own, step.begin, cells / longest)))
    return lines


def _line(pieces: Iterable[Piece], origin: float, scale: float) -> Text:
    """A piece too short to be seen gives way to the one that comes after it."""
    line = Text()
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        begin, end = (round(scale * (moment - origin)) for moment in (piece.begin, piece.end))
        line.append(" " * max(0, begin - len(line)))
        room = end - len(line)
        line.append(piece.label.ljust(room, "-")[: max(0, room)], style=STYLES[piece.phase])
    return line
