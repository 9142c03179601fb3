"""gpipe eval: evaluate trained weights from a run, a snapshot or a file on one split of the data."""

from __future__ import annotations

import time
from pathlib import Path

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.config.compose import settings_of
from gpipe_cli.config.schema import EvalConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.launch.rank_setup import is_main_process
from gpipe_cli.report.model_tables import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.build import make_engine
from gpipe_cli.run.components import keeps_on_disk
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.ranks import (
    build_parts_in_ranks,
    connect,
    run_in_ranks,
    settings_for_rank,
    starts_ranks,
    with_heartbeat,
)
from gpipe_cli.run.saved_run import (
    load_into_model,
    load_slice_by_slice,
    saved_config,
    select_snapshot,
    with_overrides,
)
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.signals import StopRequested, stop_requests
from gpipe_cli.training.snapshot.manifest import (
    BUFFERS,
    MODEL,
    VerifiedSnapshot,
    is_snapshot,
    run_directory_of,
    snapshot_paths,
)

OWN_KEYS = ("run", "snapshot", "weights", "split")
"""Keys of an evaluation; the saved settings of the run have no say in them."""


def run(settings: EvalConfig, job: Job) -> Summary:
    settings = _with_saved_settings(settings, job)
    snapshot = _select_snapshot(settings)
    settings = settings_for_rank(settings, job)
    with deterministic_algorithms(enabled=settings.deterministic), connect(settings, job) as world:
        summary = _evaluate(settings, job, snapshot, world)
    if job.shows_result and is_main_process() and not job.dry_run:
        print_facts("", summary)
    return summary


def _evaluate(settings: EvalConfig, job: Job, snapshot: VerifiedSnapshot | None, world: World) -> Summary:
    parts = build_parts_in_ranks(settings, job, world)
    weights = str(settings.weights if snapshot is None else snapshot.path / MODEL)
    in_memory = not keeps_on_disk(settings)
    if in_memory:
        load_into_model(parts.model, settings.weights, snapshot)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "weights": weights, "command": job.line}
    if starts_ranks(settings):
        return run_in_ranks(settings, job, parts, time.monotonic())
    engine = with_heartbeat(make_engine(settings, parts), job, world)
    try:
        if not in_memory:
            load_slice_by_slice(engine, parts.model, settings.weights, snapshot)
        with stop_requests(agree=world.max, patient=world.size > 1) as stops:
            tally, seconds = evaluate(engine, stops.until_stopped(parts.loader.in_order(settings.split)))
    except StopRequested as request:
        raise request.error(f"stopped by {request.reason}") from request
    finally:
        engine.close()
    return {
        "loss": tally.loss,
        **tally.means,
        "samples": tally.samples,
        "samples_per_second": tally.samples / seconds,
        "seconds": seconds,
        "split": settings.split,
        "weights": weights,
        "command": job.line,
    }


def _select_snapshot(settings: EvalConfig) -> VerifiedSnapshot | None:
    """The snapshot to evaluate, or None for a file of weights; one that may exceed memory is not read yet."""
    for key, value in (("run", settings.run), ("snapshot", settings.snapshot)):
        if value is not None:
            return select_snapshot(key, value, () if keeps_on_disk(settings) else (MODEL, BUFFERS))
    return None


def _with_saved_settings(settings: EvalConfig, job: Job) -> EvalConfig:
    """The settings of the run, overridden by those of this command; unchanged where there is no run."""
    path = settings.run or settings.snapshot
    run = None if path is None else run_directory_of(Path(path)) if is_snapshot(Path(path)) else Path(path)
    if run is None or not snapshot_paths(run):  # select_snapshot reports what is wrong with it
        return settings
    tree = with_overrides(saved_config(run), job.tree, job.overrides, OWN_KEYS)
    merged = settings_of(tree, job.command, job.overrides)
    assert isinstance(merged, EvalConfig)
    return merged
