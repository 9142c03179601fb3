"""gpipe train: open a run, build its data, model, partitions and engine, train, and summarize."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from gpipe_cli.build.optimizer import kept_state, optimizer_factory
from gpipe_cli.build.parts import RunParts
from gpipe_cli.build.step import autocast_of, make_sample
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.memory import partition_memory
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.report.model_tables import flop_rows, print_layers, print_partition_memory, print_partitions
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.runs.lifecycle import Do, Run, open_run
from gpipe_cli.runs.snapshots.manager import save_and_stop
from gpipe_cli.runs.summary import print_summary
from gpipe_cli.training.loop import TrainSpec, train


def run(settings: TrainConfig, job: Job) -> Summary:
    with open_run(settings, job) as run:  # resumed or new, locked, its ranks connected, plan=auto applied
        parts = run.build()
        spec = run.spec(parts)
        match run.what_to_do(spec):
            case Do.SHOW:
                return _show(run, parts, spec)
            case Do.NOTHING:
                summary = run.finished(parts, spec)
            case Do.LAUNCH:
                summary = run.launch_ranks(parts, spec)
            case Do.TRAIN:
                summary = _train_here(run, parts, spec)
    if job.shows_result:
        print_summary(summary, run.settings)
    return summary


def _train_here(run: Run, parts: RunParts, spec: TrainSpec) -> Summary:
    engine, loader = run.engine(parts, spec), parts.loader
    with run.begun(parts, spec) as recorder:  # from here on signals wait for a step boundary
        with run.stops() as stops, run.snapshots(engine, spec, parts, recorder) as snapshots:
            events = train(
                engine,
                spec,
                loader.train,
                lambda epoch: stops.until_stopped(loader.test(epoch)),
                run.position,
            )
            facts = run.page.follow(save_and_stop(events, spec, snapshots, stops))
            end = recorder.record(facts, lambda: stops.request is not None)
        if stopped_early := spec.stops_early(end.step, snapshots.patience):
            recorder.print_status(f"stopped early at step {end.step} of {spec.steps}: {stopped_early}")
        run.page.end(engine)
    return run.ended(end, stopped_early, parts, engine)


def _show(run: Run, parts: RunParts, spec: TrainSpec) -> Summary:
    """Print layers, partitions and estimated memory without running or writing anything."""
    settings, job = run.settings, run.job
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, int]] = []
    partitions = parts.partitions
    stats = _model_stats(settings, parts)
    if stats is not None:
        balance = parts.partitioning.balance
        layers = flop_rows(stats, balance)
        boundaries = [stats.partition_input(begin, end) for begin, end in pairwise([0, *accumulate(balance)])]
        partitions = [
            {**row, "input_shapes": boundary.shapes, "input_bytes": boundary.bytes}
            for row, boundary in zip(partitions, boundaries, strict=True)
        ]
        estimates = partition_memory(
            parts.model,
            stats,
            balance,
            parts.partitioning.spec,
            optimizer_factory(settings, parts.model),
            kept_state(settings),
        )
        memory = [{**asdict(estimate), "total_bytes": estimate.total_bytes} for estimate in estimates]
    parts.made.print_notes()
    parts.partitioning.print_origin()
    if not job.json:
        if layers:
            print_layers(layers, sort="order", top=None)
        print_partitions(partitions)
        if memory:
            print_partition_memory(memory)
        print_facts("", {"steps": spec.steps})
    if memory:
        partitions = [{**row, **sizes} for row, sizes in zip(partitions, memory, strict=True)]
    return {
        "layers": layers,
        "partitions": partitions,
        "steps": spec.steps,
        **parts.made.notes,
        "command": job.line,
    }


def _model_stats(settings: TrainConfig, parts: RunParts) -> ModelStats | None:
    """Shapes and sizes of every layer, or None if a layer depends on values and the model has none."""
    try:
        with autocast_of(settings):
            return model_stats(parts.model, make_sample(settings, parts.loader))
    except ConfigError as error:
        print_status(f"shapes and memory are unknown: {error}")
        return None
