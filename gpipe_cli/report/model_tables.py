"""Layers, partitions and plans as rows: for JSON, for a CSV file, and as tables for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn

from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.profiling.records import FLOPS, LayerStats, LayerTimes, parameter_count
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.tables import print_rows
from gpipe_cli.sequential import layer_names

Row = Mapping[str, Any]

LAYER_ORDERS = {
    "order": lambda row: row["index"],
    "time": lambda row: -row["share"],
    "memory": lambda row: -row["saved_bytes"],
}
LAYER_COLUMNS = {
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
    "source": "source",
}
"""Keys of a row and their headings, in this order; a row has times if layers were measured, else FLOPs."""
OPTIONAL_LAYER_COLUMNS = ("type", "bytes", "output", "saved", "parameters", "share", "partition")
OPTIONAL_PARTITION_COLUMNS = ("device", "input_bytes", "parameters", "layers")
PLAN_COLUMNS = {
    "balance": "balance",
    "batch_size": "batch size",
    "chunks": "chunks",
    "schedule": "schedule",
    "checkpoint": "checkpoint",
    "predicted_ms": "predicted ms",
    "measured_ms": "measured ms",
    "error": "error",
    "samples_per_second": "samples/s",
    "bubble": "bubble",
    "predicted_peak_bytes": "peak memory",
    "limit": "limited by",
}
WITHOUT_SCHEDULE = {"single": "none", "offload": "offload"}
"""What the column of schedules says of engines that have none."""
OPTIONAL_PLAN_COLUMNS = ("limited by", "samples/s", "bubble")
MAX_SHOWN = 6
"""Entries of a balance, and devices, that a table shows."""


def layer_rows(
    layers: Sequence[LayerStats], times: Sequence[LayerTimes], balance: Sequence[int], unit: str = "ms"
) -> list[dict[str, Any]]:
    """`times` are in the unit; the share of a layer is its part of their total."""
    ends = list(accumulate(balance))
    total = sum(each.forward_ms + each.backward_ms for each in times) or 1.0
    return [
        {
            **asdict(layer),
            f"forward_{unit}": each.forward_ms,
            f"backward_{unit}": each.backward_ms,
            **({"source": each.source} if unit == "ms" else {}),
            "partition": sum(layer.index >= end for end in ends),
            "share": (each.forward_ms + each.backward_ms) / total,
        }
        for layer, each in zip(layers, times, strict=True)
    ]


def flop_rows(stats: ModelStats, balance: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of layers that were not run: FLOPs in place of times."""
    flops = [LayerTimes(layer.forward_flops, layer.backward_flops, FLOPS) for layer in stats.operations]
    return layer_rows(stats.layers, flops, balance, "flops")


def print_layers(rows: Sequence[Row], *, sort: str, top: int | None) -> None:
    columns = [key for key in LAYER_COLUMNS if key in rows[0]]
    headings = {**LAYER_COLUMNS, "share": f"share of {'time' if 'forward_ms' in rows[0] else 'FLOPs'}"}
    if len({row.get("source") for row in rows}) == 1:
        columns = [key for key in columns if key != "source"]
    shown = sorted(rows, key=LAYER_ORDERS[sort])[:top]
    title = (
        "layers"
        if len(shown) == len(rows)
        else f"{len(shown)} of {len(rows)} layers (top=null shows them all)"
    )
    print_rows(
        title,
        [headings[key] for key in columns],
        [
            [
                format_shapes(row[key]) if key == "output_shape" else format_value(key, row[key])
                for key in columns
            ]
            for row in shown
        ],
        optional=[headings.get(name, name) for name in OPTIONAL_LAYER_COLUMNS],
    )


def layers_csv(rows: Sequence[Row]) -> str:
    """The content of a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({**row, "output_shape": format_shapes(row["output_shape"])} for row in rows)
    return text.getvalue()


def format_shapes(shapes: Iterable[Sequence[int]]) -> str:
    """4x64x8x8; several are separated by spaces."""
    return " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def partition_rows(
    model: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]
) -> list[dict[str, Any]]:
    """A row per partition: index, device, layers, names of the first and last layer, parameters."""
    names, layers = layer_names(model), list(model)
    ends = list(accumulate(balance))
    return [
        {
            "partition": index,
            "device": str(devices[index % len(devices)]),
            "layers": count,
            "first": names[end - count],
            "last": names[end - 1],
            "parameters": parameter_count(nn.Sequential(*layers[end - count : end])),
        }
        for index, (count, end) in enumerate(zip(balance, ends, strict=True))
    ]


def print_partitions(rows: Sequence[Row]) -> None:
    shown: list[Row] = [
        {
            **row,
            "input_shapes": format_shapes(row["input_shapes"]),
            "input_bytes": format_value("bytes", row["input_bytes"]),
        }
        if "input_shapes" in row
        else row
        for row in rows
    ]
    columns = list(shown[0])
    print_rows(
        "partitions",
        columns,
        [[row[column] for column in columns] for row in shown],
        optional=OPTIONAL_PARTITION_COLUMNS,
    )


def print_partition_memory(rows: Sequence[Mapping[str, int]]) -> None:
    """A row per partition: estimated bytes by purpose."""
    purposes = {key: key.removesuffix("_bytes") for key in rows[0]}
    headings = [name if name in ("optimizer", "total") else f"{name}s" for name in purposes.values()]
    print_rows(
        "memory, estimated",
        ["partition", *headings],
        [[index, *(format_value(key, row[key]) for key in purposes)] for index, row in enumerate(rows)],
    )


def measured_memory_rows(
    partitions: Sequence[Row], workers: Sequence[int], peaks: Sequence[int | None]
) -> list[dict[str, Any]]:
    """A row per partition: what stays allocated between steps by estimate, and the measured peak of its device.

    workers: that of each partition; peaks: one per worker, None where its device does not report it.
    """
    rows = []
    for index, partition in enumerate(partitions):
        sizes = [partition.get(f"{purpose}_bytes") for purpose in ("parameter", "gradient", "optimizer")]
        known = [size for size in sizes if size is not None]
        rows.append(
            {
                "partition": index,
                "device": partition["device"],
                "estimated_bytes": sum(known) if known else None,
                "device_peak_bytes": peaks[workers[index]],
            }
        )
    return rows


def print_measured_memory(rows: Sequence[Row]) -> None:
    """Only for devices that report their memory: otherwise there is nothing to compare the estimate with."""
    if any(row["device_peak_bytes"] is not None for row in rows):
        print_rows(
            "memory",
            ["partition", "device", "estimated without activations", "measured on the device"],
            [
                [
                    row["partition"],
                    row["device"],
                    *(format_value(key, row[key]) for key in ("estimated_bytes", "device_peak_bytes")),
                ]
                for row in rows
            ],
        )


def print_plans(title: str, plans: Sequence[Row]) -> None:
    """The plans in the given order, the best one first."""
    columns = [key for key in PLAN_COLUMNS if any(key in plan for plan in plans)]
    if len({plan.get("batch_size") for plan in plans}) == 1:
        columns.remove("batch_size")
    print_rows(
        title,
        [PLAN_COLUMNS[key] for key in columns],
        [[_plan_cell(key, plan) for key in columns] for plan in plans],
        optional=OPTIONAL_PLAN_COLUMNS,
    )


def print_device_memory(memory: Sequence[Mapping[str, int]]) -> None:
    """Memory of the best plan; of many devices, those that need most."""
    fullest = sorted(enumerate(memory), key=lambda row: -row[1]["total_bytes"])[:MAX_SHOWN]
    keys = list(memory[0])
    print_rows(
        "memory of the best plan, by device",
        ["device", *(key.removesuffix("_bytes") for key in keys)],
        [
            [device, *(format_value(key, sizes[key]) for key in keys)]
            for device, sizes in sorted(fullest, key=lambda row: row[0])
        ],
    )


def _plan_cell(key: str, plan: Row) -> str:
    value = plan.get(key)
    if value is None:
        return "-"
    if key == "balance":
        more = ",..." if len(value) > MAX_SHOWN else ""
        return f"[{','.join(map(str, value[:MAX_SHOWN]))}{more}]"
    if key == "checkpoint" and isinstance(value, list):
        return ", ".join(f"{len(list(group))}x{mode}" for mode, group in groupby(value))
    if key == "error":
        return f"{100 * value:+.1f} %"
    if key.endswith("_ms"):
        return f"{value:.1f}"
    if key == "schedule" and plan.get("engine") in WITHOUT_SCHEDULE:
        return WITHOUT_SCHEDULE[plan["engine"]]
    return format_value(key, value)
