"""A terminal for tests: what is on its screen after what a program wrote and what the terminal echoed."""

from __future__ import annotations

import re
from typing import final

from rich.cells import cell_len

TOKEN = re.compile(
    r"\x1b\[(?P<number>[0-9;?]*)(?P<command>[A-Za-z])|(?P<control>[\r\n])|(?P<character>.)", re.DOTALL
)


@final
class Screen:
    """Wraps long lines as terminals do: with the first character that does not fit, not with the last that does."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def feed(self, output: str) -> None:
        for token in TOKEN.finditer(output):
            if command := token["command"]:
                self._run(command, token["number"])
            elif token["control"] == "\r":
                self._column = 0
            elif token["control"] == "\n":
                self._go_to(self._row + 1, 0)
            else:
                self._put(token["character"])

    def _run(self, command: str, number: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "B":
            self._row += int(number or 1)
        elif command == "K":
            assert number == "2", "only whole lines are erased"
            self._rows[self._row] = []
        else:
            assert command in "mhl", f"unknown escape code {command}"

    def _put(self, character: str) -> None:
        assert cell_len(character) == 1, repr(character)
        if self._column == self._width:
            self._go_to(self._row + 1, 0)
        row = self._rows[self._row]
        row.extend(" " * (self._column + 1 - len(row)))
        row[self._column] = character
        self._column += 1

    def _go_to(self, row: int, column: int) -> None:
        self._row, self._column = row, column
        while len(self._rows) <= row:
            self._rows.append([])
