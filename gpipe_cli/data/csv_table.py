"""Samples from a CSV file: columns of numbers as features, and a column to classify or columns to predict as numbers.

The file is read line by line; a number takes four bytes of memory. Text in the target column makes classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_common_keys
from gpipe_cli.data.table_file import TableFile, open_table
from gpipe_cli.errors import ConfigError, DataError

TASKS = ("classification", "regression")
_MANY_CLASSES = 20
"""More of them than half of the rows are no classes, but numbers or names."""
_BLOCK = 2**16
"""Rows whose statistics are computed at once."""


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
