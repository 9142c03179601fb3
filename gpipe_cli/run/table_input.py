"""The CSV files that `gpipe predict` is given: each row is an input, with the columns of the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.data.table_file import open_table
from gpipe_cli.data.transforms import Transform
from gpipe_cli.errors import DataError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.run.prediction_input import InputFile, PreparedInput, transformed

DELIMITERS = (",", ";", "\t")


@final
class TableRows:
    """The rows of CSV files: the columns that the model was trained with, found by their names."""

    def __init__(
        self, features: tuple[str, ...], files: list[InputFile], transform: Transform | None
    ) -> None:
        self._features, self._transform = features, transform
        self._rows: list[tuple[InputFile, int, Tensor | DataError]] = []
        for file in files:
            self._read(file)

    def __len__(self) -> int:
        return len(self._rows)

    def file(self, index: int) -> InputFile:
        return self._rows[index][0]

    def label(self, index: int) -> dict[str, Any]:
        file, line, _ = self._rows[index]
        return {"file": str(file.path), "line": line}

    @property
    def zeros(self) -> ModelInput:
        return transformed(torch.zeros(len(self._features)), self._transform)

    def read(self, index: int) -> PreparedInput:
        row = self._rows[index][2]
        if isinstance(row, DataError):
            raise row
        return PreparedInput(transformed(row, self._transform))

    def _read(self, file: InputFile) -> None:
        delimiter, header = self._format(file)
        with open_table("input", str(file.path), delimiter, header=header) as table:
            columns = [table.column("input", name) for name in self._features]
            for row in table.rows():
                try:
                    value: Tensor | DataError = torch.tensor(table.numbers(row, columns))
                except DataError as error:
                    value = error
                self._rows.append((file, row.line, value))

    def _format(self, file: InputFile) -> tuple[str, bool]:
        """The first delimiter with which the file has all columns; without a header, columns are called by number."""
        numbered = all(name.isdecimal() for name in self._features)
        formats = [
            (delimiter, header) for header in (True, False) if header or numbered for delimiter in DELIMITERS
        ]
        problem: DataError | None = None
        for delimiter, header in formats:
            try:
                with open_table("input", str(file.path), delimiter, header=header) as table:
                    if set(self._features) <= set(table.columns):
                        return delimiter, header
                    problem = problem or self._lacks(file, table.columns)
            except DataError as error:
                problem = problem or DataError(f"{error}; this model takes the rows of CSV files")
        assert problem is not None, "there is a format"
        raise problem

    def _lacks(self, file: InputFile, columns: Sequence[str]) -> DataError:
        name = next(name for name in self._features if name not in columns)
        return DataError(
            f"input={file.path}: lacks the column '{name}', which the model was trained with; it has "
            f"{', '.join(columns[:20])}"
        )
