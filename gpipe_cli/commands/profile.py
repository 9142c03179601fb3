"""gpipe profile: measure time and memory of every layer, at the micro-batch size of a run.

`measure=false` runs nothing and counts floating-point operations instead; `timeline=true` also runs a few steps of
the whole pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.balance.time import balance_times, partition_costs
from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.parts import RunParts, build_parts
from gpipe_cli.build.recorded_steps import (
    partition_for_timeline,
    print_timeline,
    record_kernels,
    record_timeline,
)
from gpipe_cli.build.step import make_sample
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import ProfileConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Batch
from gpipe_cli.profiling.layer_times import layer_stats, layer_times, most_runs
from gpipe_cli.profiling.memory import activation_bytes
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import LayerTimes, Sample, frozen_layers, parameter_count
from gpipe_cli.profiling.timeline import BalanceGain, late_after
from gpipe_cli.report.model_tables import flop_rows, layer_rows, layers_csv, print_layers, print_partitions
from gpipe_cli.report.page.render import PAGE
from gpipe_cli.report.tables import print_facts
from gpipe_cli.report.trace import trace_json
from gpipe_cli.runs.directory import check_run_dir, make_run_directory, write_json, write_text
from gpipe_cli.runs.launch_record import launch_facts, write_config, write_launch
from gpipe_cli.runs.summary import write_report

COSTS = ("forward_ms", "backward_ms", "forward_flops", "backward_flops", "saved_bytes")
HINT = "try more chunks, or measure=false, which counts operations and bytes instead"
TABLES = ("layers", "timeline")
"""Parts of the summary that are printed as tables."""


def run(settings: ProfileConfig, job: Job) -> Summary:
    with deterministic_algorithms(enabled=settings.deterministic):
        return _profile(settings, job)


def _profile(settings: ProfileConfig, job: Job) -> Summary:
    check_run_dir(settings.run_dir)
    parts = build_parts(
        settings, job.overrides, storage=settings.measure, if_it_fits=settings.measure and job.dry_run
    )
    parts.made.print_notes()
    parts = partition_for_timeline(settings, parts)
    if job.dry_run:
        parts.partitioning.print_origin()
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "command": job.line}

    balance, spec = parts.partitioning.balance, parts.partitioning.spec
    sample = make_sample(settings, parts.loader).to(parts.partitioning.devices[0])
    summary: dict[str, Any] = {"layers": [], "micro_batch": Batch(sample.input, "input").rows}
    timeline = None
    if settings.measure:
        with report_out_of_memory("measuring the layers on one device", HINT):
            layers = _measured(settings, parts.model, sample)
            stats = _stats(parts.model, sample)
            untimed = layer_stats(parts.model, sample) if stats is None else stats.layers
        rows = layer_rows(untimed, layers, balance)
        ideal = spec.simulate(partition_costs(layers, balance, frozen_layers(parts.model, sample)))
        activations = None if stats is None else activation_bytes(stats, balance, spec)
        summary |= {
            **_totals(parts.model, rows),
            "predicted_step_ms": ideal.step,
            "predicted_bubble": ideal.bubble,
            "predicted_speedup": len(spec.order) * (1 - ideal.bubble),
        }
        if settings.timeline:
            gain = _balance_gain(layers, parts, sample) if traits_of_engine(settings).has_partitions else None
            timeline = record_timeline(settings, parts, sample, ideal, activations, gain)
            summary["timeline"] = timeline.summary
    else:
        stats = model_stats(parts.model, sample)
        activations = activation_bytes(stats, balance, spec)
        rows = flop_rows(stats, balance)
        summary |= _totals(parts.model, rows)
    summary |= {"layers": rows, "command": job.line}

    directory = make_run_directory(settings.run_dir, job.command, job.model)
    write_config(directory, job)
    write_launch(directory, launch_facts(settings, job, parts, activations))
    if settings.kernels:
        summary |= _record_kernels(settings, parts, sample, directory)
    write_json(directory / "profile.json", summary)
    write_text(directory / "profile.csv", layers_csv(rows))
    if timeline is not None:
        write_text(directory / "trace.json", trace_json(timeline.steps, timeline.ideal, timeline.row_names))
    write_report(directory)
    parts.partitioning.print_origin()
    if job.shows_result:
        print_layers(rows, sort=settings.sort, top=settings.top)
        if timeline is not None:
            print_timeline(timeline)
        facts_ = {key: value for key, value in summary.items() if key not in TABLES}
        print_facts("", {**facts_, "run_dir": str(directory), "report": str(directory / PAGE)})
    return {**summary, "run_dir": str(directory)}


def _record_kernels(
    settings: ProfileConfig, parts: RunParts, sample: Sample, directory: Path
) -> dict[str, Any]:
    """Write what torch's profiler saw of a step; return the files."""
    files = {"kernels": str(directory / "kernels.json")}
    memory = record_kernels(settings, parts, sample, Path(files["kernels"]))
    if memory is not None:
        files["memory_snapshot"] = str(directory / "memory_snapshot.json")
        write_json(Path(files["memory_snapshot"]), {"segments": memory})
    return files


def _measured(settings: ProfileConfig, model: nn.Sequential, sample: Sample) -> list[LayerTimes]:
    seconds = settings.seconds
    layers = layer_times(model, sample, runs=most_runs(seconds), is_late=late_after(seconds))
    if all(layer.is_work for layer in layers):
        raise ConfigError(
            f"seconds={seconds}: too short to measure a layer with FLOPs; give more, or measure=false"
        )
    return layers


def _balance_gain(layers: Sequence[LayerTimes], parts: RunParts, sample: Sample) -> BalanceGain:
    """What the balance by these times is worth."""
    balance, spec, frozen = (
        parts.partitioning.balance,
        parts.partitioning.spec,
        frozen_layers(parts.model, sample),
    )
    best = balance_times(layers, spec, frozen).layers
    now, then = (spec.simulate(partition_costs(layers, each, frozen)).step for each in (balance, best))
    return BalanceGain(balance, now, best, then)


def _stats(model: nn.Sequential, sample: Sample) -> ModelStats | None:
    """None if a layer depends on values."""
    try:
        return model_stats(model, sample, count_flops=False)
    except ConfigError:
        return None


def _totals(model: nn.Sequential, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of the columns that the rows have; a parameter that layers share counts once."""
    return {
        **{key: sum(row[key] for row in rows) for key in COSTS if key in rows[0]},
        "parameters": parameter_count(model),
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }
