"""gpipe profile: time and memory of every layer, at the micro-batch size a run would use.

`measure=false` runs nothing and gives floating-point operations instead of times; `timeline=true` runs a few steps
of the whole pipeline as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.balance.time import partition_costs
from gpipe_cli.commands.report import leave_page
from gpipe_cli.config.schema import ProfileConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Batch
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import LayerProfile, Sample, profile_layers
from gpipe_cli.profiling.partition_memory import activation_bytes
from gpipe_cli.report.layers import counted_rows, csv_text, layer_rows, print_layers
from gpipe_cli.report.page.document import PAGE
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.report.trace import trace_text
from gpipe_cli.run.build import Assembly, assemble, make_sample
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.launch_record import launch_of, write_launch
from gpipe_cli.run.recorded import with_slices
from gpipe_cli.run.setup import write_config
from gpipe_cli.run.timeline import Seen, show_timeline, watch
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import Simulation
from gpipe_cli.training.run_directory import check_run_dir, make_run_directory, write_json, write_text

Rows = list[dict[str, Any]]
TABLES = ("layers", "timeline")  # parts of the summary that are printed in a form of their own


def run(settings: ProfileConfig, job: Job) -> Summary:
    check_run_dir(settings.run_dir, job.number)
    parts = assemble(settings, job.overrides, storage=settings.measure and not job.dry_run)
    parts = with_slices(settings, parts)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "command": job.line}

    sample = make_sample(settings, parts.feed).to(parts.split.devices[0])
    summary: dict[str, Any] = {"layers": [], "micro_batch": Batch(sample.input, "input").rows}
    seen = None
    if settings.measure:
        layers = profile_layers(parts.model, sample, seconds=settings.seconds)
        rows = _rows(layers, parts.split.balance)
        ideal = parts.split.spec.simulate(partition_costs(layers, parts.split.balance))
        summary |= {**_sums(rows), **_prediction(ideal, parts.split.spec)}
        activations = _activations(parts, sample)
        if settings.timeline:
            seen = watch(settings, parts, sample, ideal, activations)
            summary["timeline"] = seen.summary
    else:
        facts = model_facts(parts.model, sample)
        activations = activation_bytes(facts, parts.split.balance, parts.split.spec)
        rows = counted_rows(facts, parts.split.balance)
        summary |= _sums(rows)
    summary |= {"layers": rows, "command": job.line}
    directory = make_run_directory(settings.run_dir, job.command, job.model, job.number)
    write_config(directory, job)
    write_launch(directory, launch_of(settings, job, parts, activations))
    _write(directory, summary, seen)
    leave_page(directory)
    if job.shows_result:
        print_layers(rows, sort=settings.sort, top=settings.top)
        if seen is not None:
            show_timeline(seen)
        told = {key: value for key, value in summary.items() if key not in TABLES}
        print_facts("", {**told, "run_dir": str(directory), "report": str(directory / PAGE)})
    return {**summary, "run_dir": str(directory)}


def _activations(parts: Assembly, sample: Sample) -> list[int] | None:
    """The most that each partition keeps for backward at once; None where a layer must be run to be judged."""
    try:
        facts = model_facts(parts.model, sample, count_flops=False)
    except ConfigError:
        return None
    return activation_bytes(facts, parts.split.balance, parts.split.spec)


def _write(directory: Path, summary: dict[str, Any], seen: Seen | None) -> None:
    write_json(directory / "profile.json", summary)
    write_text(directory / "profile.csv", csv_text(summary["layers"]))
    if seen is not None:
        write_text(directory / "trace.json", trace_text(seen.steps, seen.ideal, seen.names))


def _rows(layers: Sequence[LayerProfile], balance: Sequence[int]) -> Rows:
    times = [{"forward_ms": one.forward_ms, "backward_ms": one.backward_ms} for one in layers]
    return layer_rows([one.facts for one in layers], times, balance)


def _sums(rows: Rows) -> dict[str, Any]:
    """Over all layers, whatever of it is known."""
    costs = ("forward_ms", "backward_ms", "forward_flops", "backward_flops")
    sizes = ("saved_bytes", "parameters", "parameter_bytes")
    return {key: sum(row[key] for row in rows) for key in (*costs, *sizes) if key in rows[0]}


def _prediction(ideal: Simulation, spec: PipelineSpec) -> dict[str, Any]:
    """What a step of the whole mini-batch would take with this balance and schedule, by simulation."""
    return {
        "predicted_step_ms": ideal.step,
        "predicted_bubble": ideal.bubble,
        "predicted_speedup": len(spec.order) * (1 - ideal.bubble),
    }
