"""Samples from a CSV file: columns of numbers as features, and a column to classify or columns to predict as numbers.

The file is read line by line; a number takes four bytes of memory. Text in the target column makes classes. Every
error names the file, the line and the column.
"""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys
from gpipe_cli.errors import ConfigError, DataError, or_list
from gpipe_cli.safe_files import open_regular

TASKS = ("classification", "regression")
_MANY_CLASSES = 20
"""More of them than half of the rows are no classes, but numbers or names."""
_BLOCK = 2**16
"""Rows whose statistics are computed at once."""
MAX_LINE = 2**24
"""Characters of a line."""
MAX_COLUMNS = 2**17
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_LARGEST = 3.4e38
"""Of a float with 32 bits."""


def build(
    path: str,
    target: str | int | list[str | int],
    features: list[str | int] | None = None,
    ignore: list[str | int] | None = None,
    test: str | None = None,
    header: bool = True,
    delimiter: str = ",",
    task: str | None = None,
    workers: int = 0,
    timeout: float | None = None,
    *,
    predicts_numbers: bool | None = None,
) -> Data:
    """predicts_numbers: what the loss needs; None if it does not say."""
    check_common_keys(None, workers, timeout)
    if task not in (None, *TASKS):
        raise ConfigError(f"data.task={task}: must be one of: {', '.join(TASKS)}, or null")
    numbers = predicts_numbers if task is None else task == "regression"
    targets = target if isinstance(target, list) else [target]
    if numbers is False and len(targets) != 1:
        raise ConfigError(
            f"data.target={targets}: classification takes one column; loss=mse predicts several numbers"
        )
    spec = _Columns(targets, features, ignore or [])
    with open_table("data.path", path, delimiter, header=header) as file:
        table = _read(file, spec, numbers)
    test_table = None
    if test is not None:
        with open_table("data.test", test, delimiter, header=header) as file:
            test_table = _read(file, spec, table.names is None, table)
    return Data(
        table.samples,
        None if test_table is None else test_table.samples,
        classes=len(targets) if table.names is None else len(table.names),
        shape=(len(table.features),),
        workers=workers,
        timeout=timeout,
        class_names=table.names,
        feature_names=table.features,
        notes=table.notes,
    )


@final
@dataclass(frozen=True)
class _Columns:
    targets: Sequence[str | int]
    features: Sequence[str | int] | None
    ignored: Sequence[str | int]

    def of(self, file: TableFile) -> tuple[list[int], list[int]]:
        """The indices of the feature columns and of the target columns."""
        targets = [file.column("data.target", name) for name in self.targets]
        ignored = {file.column("data.ignore", name) for name in self.ignored}
        if self.features is None:
            features = [i for i in range(len(file.columns)) if i not in ignored and i not in targets]
        else:
            features = [file.column("data.features", name) for name in self.features]
        for key, columns in (("target", targets), ("features", features)):
            if len(set(columns)) < len(columns):
                raise ConfigError(f"data.{key}: names a column twice")
        for index in targets:
            if index in features or index in ignored:
                other = "data.features" if index in features else "data.ignore"
                raise ConfigError(f"data.target={file.columns[index]}: is also in {other}")
        if not features:
            raise ConfigError(f"data.features: no column of {file.path} is left besides the target")
        return features, targets


@final
class TableSamples:
    """Rows of numbers in memory. inputs: [rows, features]; targets: classes [rows] or numbers [rows, targets]."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._inputs.index_select(0, indices), self._targets.index_select(0, indices)

    def mean_and_std(self, indices: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per feature; the std of a constant feature is 1.

        Six digits: the last bits of a sum depend on the number of threads, and results must not.
        """
        blocks = torch.split(indices, _BLOCK)
        mean = sum((self._inputs[block].double().sum(0) for block in blocks), torch.zeros(())) / len(indices)
        squares = ((self._inputs[block].double() - mean).square().sum(0) for block in blocks)
        std = (sum(squares, torch.zeros(())) / len(indices)).sqrt()
        return _rounded(mean), tuple(value or 1.0 for value in _rounded(std))


@final
@dataclass(frozen=True)
class _Table:
    samples: TableSamples
    features: tuple[str, ...]
    names: tuple[str, ...] | None
    """Those of the classes; None if the targets are numbers."""
    notes: tuple[str, ...] = ()


def _read(file: TableFile, spec: _Columns, numbers: bool | None, train: _Table | None = None) -> _Table:
    """numbers: whether targets are numbers; None decides by their values. train: the table to agree with."""
    features, targets = spec.of(file)
    names = tuple(file.columns[index] for index in features)
    if train is not None and names != train.features:
        raise DataError(f"data.test={file.path}: its columns are not those of data.path, in the same order")
    inputs, values, labels = array("f"), array("f"), array("q")
    classes: dict[str, int] = {}
    for row in file.rows():
        inputs.extend(file.numbers(row, features))
        if numbers:
            values.extend(file.numbers(row, targets))
        else:
            label = file.text(row, targets[0])
            if train is not None and train.names is not None and label not in train.names:
                raise file.error(row, targets[0], f"'{label}' is no class of data.path")
            labels.append(classes.setdefault(label, len(classes)))
    if not inputs:
        raise DataError(f"{file.path}: has no rows")
    rows = torch.frombuffer(inputs, dtype=torch.float32).view(-1, len(features))
    if numbers or (numbers is None and _are_numbers(classes) and not _are_whole(classes)):
        if not numbers:
            lookup = torch.tensor([float(text) for text in classes])
            target = lookup[torch.frombuffer(labels, dtype=torch.int64)].unsqueeze(1)
        else:
            target = torch.frombuffer(values, dtype=torch.float32).view(-1, len(targets))
        return _Table(TableSamples(rows, target), names, None, _scale_note(spec, target))
    ordered = _ordered(classes) if train is None or train.names is None else train.names
    _check_classes(file, spec, classes, len(rows))
    position = {name: index for index, name in enumerate(ordered)}
    lookup = torch.tensor([position[name] for name in classes])
    return _Table(TableSamples(rows, lookup[torch.frombuffer(labels, dtype=torch.int64)]), names, ordered)


def _check_classes(file: TableFile, spec: _Columns, classes: dict[str, int], rows: int) -> None:
    """Refuse a target of numbers: each would become a class."""
    target = spec.targets[0]
    if _are_numbers(classes) and not _are_whole(classes):
        example = next(text for text in classes if not _are_whole([text]))
        raise DataError(
            f"data.target={target}: has numbers such as {example}, not classes; choose loss=mse to predict numbers"
        )
    if _are_numbers(classes) and len({float(text) for text in classes}) < len(classes):
        raise DataError(
            f"data.target={target}: writes the same class in two ways, such as 1 and 1.0; use one"
        )
    if len(classes) > max(_MANY_CLASSES, rows / 2):
        raise DataError(
            f"data.target={target}: {len(classes)} different values in {rows} rows are no classes; choose another "
            "column, or loss=mse to predict numbers"
        )


def _scale_note(spec: _Columns, target: Tensor) -> tuple[str, ...]:
    """Features are normalized, targets are not: a network that starts near 0 takes long to reach 100,000."""
    scale = float(target.abs().mean())
    if scale < 1000:
        return ()
    name = ", ".join(map(str, spec.targets))
    return (
        f"data.target={name}: its values are about {scale:,.0f}, which takes a network long to reach; give it in "
        "larger units, such as thousands",
    )


def _ordered(classes: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
    """In alphabetical order, numbers by their value."""
    return tuple(sorted(classes, key=float)) if _are_numbers(classes) else tuple(sorted(classes))


def _are_numbers(texts: Sequence[str] | dict[str, int]) -> bool:
    try:
        return all(torch.isfinite(torch.tensor(float(text))) for text in texts)
    except ValueError:
        return False


def _are_whole(texts: Sequence[str] | dict[str, int]) -> bool:
    return all(float(text).is_integer() for text in texts)


def _rounded(numbers: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{number:.6g}") for number in numbers.tolist())


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
