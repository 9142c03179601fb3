"""gpipe profile: time and memory of every layer, at the micro-batch size a run would use."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from gpipe_cli.commands.assemble import Split, assemble, make_sample
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.config.schema import Profile
from gpipe_cli.engines.devices import available_cores
from gpipe_cli.pipeline.microbatch import batch_size
from gpipe_cli.profiling.layers import LayerProfile, profile_layers
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts, print_rows
from gpipe_cli.schedule import order
from gpipe_cli.schedule.simulate import PartitionCost, simulate
from gpipe_cli.training.run_directory import check_run_dir, make_run_directory, write_json

COLUMNS = (
    "layer",
    "name",
    "type",
    "partition",
    "parameters",
    "saved MiB",
    "output",
    "forward ms",
    "backward ms",
)


def run(settings: Profile, job: Job) -> Summary:
    check_run_dir(settings.run_dir, job.number)
    parts = assemble(settings, job.overrides)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "command": job.line}

    sample = make_sample(settings, parts.feed)
    layers = profile_layers(parts.model, sample, seconds=settings.seconds)
    rows = _rows(layers, parts.split.balance)
    summary = {
        "layers": rows,
        "micro_batch": batch_size(sample.input),
        "forward_ms": sum(one.forward_ms for one in layers),
        "backward_ms": sum(one.backward_ms for one in layers),
        "saved_bytes": sum(one.facts.saved_bytes for one in layers),
        "parameters": sum(one.facts.parameters for one in layers),
        **_prediction(rows, parts.split, settings),
        "command": job.line,
    }
    directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
    write_json(directory / "profile.json", summary)
    _write_csv(directory / "profile.csv", rows)
    if job.shows_result:
        _show(rows, settings)
        print_facts("", {**{key: summary[key] for key in list(summary)[1:]}, "run_dir": str(directory)})
    return {**summary, "run_dir": str(directory)}


def _rows(layers: Sequence[LayerProfile], balance: Sequence[int]) -> list[dict[str, Any]]:
    ends = list(accumulate(balance))
    total = sum(one.ms for one in layers) or 1.0
    return [
        {
            **asdict(one.facts),
            "forward_ms": one.forward_ms,
            "backward_ms": one.backward_ms,
            "partition": sum(one.facts.index >= end for end in ends),
            "share": one.ms / total,
        }
        for one in layers
    ]


def _prediction(rows: Sequence[dict[str, Any]], split: Split, settings: Profile) -> dict[str, Any]:
    """What a step of the whole mini-batch would take with this balance and schedule, by simulation."""
    costs = [
        PartitionCost(
            forward=sum(row["forward_ms"] for row in rows if row["partition"] == index),
            backward=sum(row["backward_ms"] for row in rows if row["partition"] == index),
        )
        for index in range(len(split.balance))
    ]
    on_cpu = all(device.type == "cpu" for device in split.devices)
    found = simulate(
        order(settings.schedule.name, len(costs), settings.chunks, len(split.devices)),
        costs,
        cores=available_cores() if on_cpu else None,
    )
    alone = settings.chunks * sum(cost.forward + cost.backward for cost in costs)
    return {
        "predicted_step_ms": found.step,
        "predicted_bubble": found.bubble,
        "predicted_speedup": alone / found.step,
    }


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _show(rows: Sequence[dict[str, Any]], settings: Profile) -> None:
    keys = {
        "order": lambda row: row["index"],
        "time": lambda row: -row["share"],
        "memory": lambda row: -row["saved_bytes"],
    }
    chosen = sorted(rows, key=keys[settings.sort])[: settings.top]
    print_rows(
        "layers",
        (*COLUMNS, "share"),
        [
            (
                row["index"],
                row["name"],
                row["type"],
                row["partition"],
                row["parameters"],
                f"{row['saved_bytes'] / 2**20:.2f}",
                " ".join("x".join(map(str, shape)) for shape in row["output_shape"]),
                f"{row['forward_ms']:.3f}",
                f"{row['backward_ms']:.3f}",
                f"{100 * row['share']:.1f} %",
            )
            for row in chosen
        ],
    )
