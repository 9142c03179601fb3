"""Rows of a CSV file, read line by line; every error names the file, the line and the column."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, final

from gpipe_cli.errors import ConfigError, DataError, or_list
from gpipe_cli.safe_files import open_regular

MAX_LINE = 2**24
"""Characters of a line."""
MAX_COLUMNS = 2**17
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_LARGEST = 3.4e38
"""Of a float with 32 bits."""


@final
@dataclass(frozen=True)
class Row:
    line: int
    fields: list[str]


@final
class TableFile:
    """An open CSV file whose first line has been read."""

    def __init__(self, path: str, file: TextIO, delimiter: str, *, header: bool) -> None:
        self.path = path
        self._reader = csv.reader(self._lines(file), delimiter=delimiter, strict=True)
        self._first = self._next_row()
        if self._first is None:
            raise DataError(f"{path}: is empty")
        fields = self._first.fields
        if len(fields) > MAX_COLUMNS:
            raise DataError(f"{path}: has {len(fields):,} columns; gpipe reads at most {MAX_COLUMNS:,}")
        self.columns = [name.strip() for name in fields] if header else [str(i) for i in range(len(fields))]
        if header:
            self._first = None
            self._check_names()

    def column(self, key: str, name: str | int) -> int:
        """The index of a column that `key` names."""
        if str(name) in self.columns:
            return self.columns.index(str(name))
        hint = or_list(str(name), self.columns[:20])
        if all(_is_number(column) for column in self.columns):
            hint = "the first line has only numbers; with data.header=false columns are numbered from 0"
        elif len(self.columns) == 1:
            hint = f"{hint}; if the file separates columns otherwise than by a comma, give data.delimiter=';'"
        raise ConfigError(f"{key}={name}: {self.path} has no such column; {hint}")

    def rows(self) -> Iterator[Row]:
        """All rows but the header; blank lines are skipped."""
        row = self._first or self._next_row()
        while row is not None:
            if len(row.fields) != len(self.columns):
                raise DataError(
                    f"{self.path}, line {row.line}: the number of fields is {len(row.fields)}, but "
                    f"{len(self.columns)} in the first line"
                )
            yield row
            row = self._next_row()

    def number(self, row: Row, column: int) -> float:
        """The number of a field; DataError if it is missing or no finite number."""
        text = row.fields[column].strip()
        if text.lower() in _MISSING:
            raise self.error(row, column, "is missing; fill it in, or leave out the row or the column")
        try:
            number = float(text)
        except ValueError as error:
            cure = "write it as a number, or leave the column out with data.ignore"
            raise self.error(row, column, f"'{_short(text)}' is no number; {cure}") from error
        if not -_LARGEST < number < _LARGEST:
            raise self.error(row, column, f"'{_short(text)}' is not finite, or too large")
        return number

    def numbers(self, row: Row, columns: Sequence[int]) -> list[float]:
        try:
            numbers = [float(row.fields[column]) for column in columns]
        except ValueError:
            return [self.number(row, column) for column in columns]  # raises with the column
        # False for nan as well.
        if not all(-_LARGEST < number < _LARGEST for number in numbers):
            return [self.number(row, column) for column in columns]
        return numbers

    def text(self, row: Row, column: int) -> str:
        text = row.fields[column].strip()
        if not text:
            raise self.error(row, column, "is missing; fill it in, or leave out the row")
        return text

    def error(self, row: Row, column: int, problem: str) -> DataError:
        return DataError(f"{self.path}, line {row.line}, column '{_short(self.columns[column])}': {problem}")

    def _next_row(self) -> Row | None:
        try:
            for fields in self._reader:
                if fields:
                    return Row(self._reader.line_num, fields)
        except csv.Error as error:
            raise DataError(f"{self.path}, line {self._reader.line_num}: is no CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: is not UTF-8 text: {error.reason}") from error
        return None

    def _lines(self, file: TextIO) -> Iterator[str]:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE:
                raise DataError(f"{self.path}, line {number}: has more than {MAX_LINE:,} characters")
            if "\0" in line:
                raise DataError(f"{self.path}, line {number}: is no text: it has a null byte")
            yield line

    def _check_names(self) -> None:
        seen = set[str]()
        for index, name in enumerate(self.columns):
            if not name:
                raise DataError(
                    f"{self.path}: column {index + 1} has no name in the first line; give it one, or set "
                    "data.header=false"
                )
            if name in seen:
                raise DataError(f"{self.path}: has two columns named '{_short(name)}'; rename one of them")
            seen.add(name)


@contextmanager
def open_table(key: str, path: str, delimiter: str = ",", *, header: bool = True) -> Iterator[TableFile]:
    """Open the file that `key` names."""
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '\r\n"':
        raise ConfigError(f"data.delimiter={delimiter!r}: must be one character, such as ',' or ';'")
    try:
        # utf-8-sig drops the byte order mark that spreadsheets write.
        file = os.fdopen(open_regular(Path(path)), encoding="utf-8-sig", newline="")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{key}={path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    with file:
        yield TableFile(path, file, delimiter, header=header)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
