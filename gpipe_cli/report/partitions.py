"""Which layers run where: a row per partition, for people and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_cli.report.layers import shapes_text
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.tables import print_rows
from gpipe_cli.sequential import layer_names

_OPTIONAL = ("device", "input_bytes", "parameters", "layers")
"""Columns of the partitions that give way on a narrow terminal."""


def partition_rows(
    model: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[dict[str, Any]]:
    """Index, device, layers, first and last name, parameters."""
    return list(_rows(list(zip(layer_names(model), model, strict=True)), balance, devices))


def print_partitions(rows: Sequence[Mapping[str, Any]]) -> None:
    _print("partitions", [{**row, **_readable_border(row)} for row in rows], optional=_OPTIONAL)


def print_memory(rows: Sequence[Mapping[str, int]]) -> None:
    """A row per partition: bytes by what they are for."""
    _print(
        "memory, estimated",
        [
            {"partition": index, **{_heading(key): readable(key, row[key]) for key in row}}
            for index, row in enumerate(rows)
        ],
    )


def _readable_border(row: Mapping[str, Any]) -> dict[str, str]:
    """Shapes and bytes of what a partition is sent, where they are known."""
    if "input_shapes" not in row:
        return {}
    return {
        "input_shapes": shapes_text(row["input_shapes"]),
        "input_bytes": readable("bytes", row["input_bytes"]),
    }


def _heading(key: str) -> str:
    word = key.removesuffix("_bytes")
    return word if word in ("optimizer", "total") else f"{word}s"


def _print(title: str, rows: Sequence[Mapping[str, Any]], optional: Sequence[str] = ()) -> None:
    columns = list(rows[0])
    print_rows(title, columns, [[row[column] for column in columns] for row in rows], optional=optional)


def _rows(
    layers: list[tuple[str, nn.Module]], balance: Sequence[int], devices: Sequence[torch.device]
) -> Iterator[dict[str, Any]]:
    begin = 0
    for index, count in enumerate(balance):
        mine = layers[begin : begin + count]
        begin += count
        yield {
            "partition": index,
            "device": str(devices[index % len(devices)]),
            "layers": count,
            "first": mine[0][0],
            "last": mine[-1][0],
            "parameters": sum(one.numel() for _, layer in mine for one in layer.parameters()),
        }
