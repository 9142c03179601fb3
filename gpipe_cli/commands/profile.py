"""gpipe profile: time and memory of every layer, at the micro-batch size a run would use.

`measure=false` runs nothing and gives floating-point operations instead of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_cli.commands.assemble import Assembly, Split, assemble, make_sample
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.config.schema import Profile
from gpipe_cli.engines.devices import available_cores
from gpipe_cli.pipeline.microbatch import batch_size
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample, profile_layers
from gpipe_cli.report.layers import counted_rows, layer_rows, print_layers, write_csv
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.schedule import order
from gpipe_cli.schedule.simulate import PartitionCost, simulate
from gpipe_cli.training.run_directory import check_run_dir, make_run_directory, write_json

Rows = list[dict[str, Any]]


def run(settings: Profile, job: Job) -> Summary:
    check_run_dir(settings.run_dir, job.number)
    parts = assemble(settings, job.overrides, storage=settings.measure and not job.dry_run)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "command": job.line}

    sample = make_sample(settings, parts.feed)
    rows = (
        _measured(settings, parts, sample)
        if settings.measure
        else counted_rows(model_facts(parts.model, sample), parts.split.balance)
    )
    summary = {
        "layers": rows,
        "micro_batch": batch_size(sample.input),
        **_sums(rows),
        **(_prediction(rows, parts.split, settings) if settings.measure else {}),
        "command": job.line,
    }
    directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
    write_json(directory / "profile.json", summary)
    write_csv(directory / "profile.csv", rows)
    if job.shows_result:
        print_layers(rows, sort=settings.sort, top=settings.top)
        print_facts("", {**{key: summary[key] for key in list(summary)[1:]}, "run_dir": str(directory)})
    return {**summary, "run_dir": str(directory)}


def _measured(settings: Profile, parts: Assembly, sample: Sample) -> Rows:
    layers = profile_layers(parts.model, sample, seconds=settings.seconds)
    times = [{"forward_ms": one.forward_ms, "backward_ms": one.backward_ms} for one in layers]
    return layer_rows([one.facts for one in layers], times, parts.split.balance)


def _sums(rows: Rows) -> dict[str, Any]:
    """Over all layers, whatever of it is known."""
    costs = ("forward_ms", "backward_ms", "forward_flops", "backward_flops")
    sizes = ("saved_bytes", "parameters", "parameter_bytes")
    return {key: sum(row[key] for row in rows) for key in (*costs, *sizes) if key in rows[0]}


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
