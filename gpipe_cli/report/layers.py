"""Facts of layers as rows: for JSON, for a CSV file, for a table that is sorted and cut as asked.

A row holds what is known: times where layers were measured, floating-point operations where they were not.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from gpipe_cli.profiling.facts import ModelFacts
from gpipe_cli.profiling.saved_tensors import LayerFacts
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.tables import print_rows

__all__ = ["counted_rows", "csv_text", "layer_rows", "print_layers", "shapes_text"]

Row = Mapping[str, Any]

_SORTS = {
    "order": lambda row: row["index"],
    "time": lambda row: -row["share"],
    "memory": lambda row: -row["saved_bytes"],
}
_HEADINGS = {
    "index": "layer",
    "name": "name",
    "type": "type",
    "partition": "partition",
    "parameters": "parameters",
    "parameter_bytes": "bytes",
    "saved_bytes": "saved",
    "output_shape": "output",
    "forward_ms": "forward ms",
    "backward_ms": "backward ms",
    "forward_flops": "forward FLOPs",
    "backward_flops": "backward FLOPs",
    "share": "share",
}
"""The columns of the table, in this order; a row has the keys of some of them."""

_OPTIONAL = ("type", "bytes", "output", "partition", "parameters", "share", "saved")
"""Headings that give way on a narrow terminal; files and JSON have them all."""


def layer_rows(
    layers: Sequence[LayerFacts], costs: Sequence[Mapping[str, float]], balance: Sequence[int]
) -> list[dict[str, Any]]:
    """`costs` are further columns per layer, all in one unit; a layer's share is of their sum."""
    ends = list(accumulate(balance))
    total = sum(sum(cost.values()) for cost in costs) or 1.0
    return [
        {
            **asdict(facts),
            **cost,
            "partition": sum(facts.index >= end for end in ends),
            "share": sum(cost.values()) / total,
        }
        for facts, cost in zip(layers, costs, strict=True)
    ]


def counted_rows(facts: ModelFacts, balance: Sequence[int]) -> list[dict[str, Any]]:
    """For layers that were not run: with operations in place of times."""
    counts = [{"forward_flops": one.forward, "backward_flops": one.backward} for one in facts.flops]
    return layer_rows(facts.layers, counts, balance)


def print_layers(rows: Sequence[Row], *, sort: str, top: int | None) -> None:
    columns = [key for key in _HEADINGS if key in rows[0]]
    shown = sorted(rows, key=_SORTS[sort])[:top]
    title = "layers" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} layers (top=null: all)"
    print_rows(
        title,
        [_HEADINGS[key] for key in columns],
        [[_cell(key, row[key]) for key in columns] for row in shown],
        optional=_OPTIONAL,
    )


def csv_text(rows: Sequence[Row]) -> str:
    """The content of a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({**row, "output_shape": shapes_text(row["output_shape"])} for row in rows)
    return text.getvalue()


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """4x64x8x8, several with a space between; a number alone is a scalar."""
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _cell(key: str, value: Any) -> str:
    return shapes_text(value) if key == "output_shape" else readable(key, value)
