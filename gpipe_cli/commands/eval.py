"""gpipe eval: evaluate trained weights from a run, a snapshot or a file on one split of the data."""

from __future__ import annotations

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.config.schema import EvalConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.launch.rank_setup import is_main_process
from gpipe_cli.report.model_tables import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.components import starts_ranks
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.ranks import connect, run_in_ranks, settings_for_rank
from gpipe_cli.run.snapshot_choice import ChosenSnapshot
from gpipe_cli.run.trained import (
    build_trained,
    snapshot_of,
    trained_engine,
    weights_name,
    with_saved_settings,
)
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.signals import StopRequested, stop_requests


def run(settings: EvalConfig, job: Job) -> Summary:
    settings = with_saved_settings(settings, job)
    settings = settings_for_rank(settings, job)
    with deterministic_algorithms(enabled=settings.deterministic), connect(settings, job) as world:
        summary = _evaluate(settings, job, snapshot_of(settings, job, world), world)
    if job.shows_result and is_main_process() and not job.dry_run:
        print_facts("", summary)
    return summary


def _evaluate(settings: EvalConfig, job: Job, snapshot: ChosenSnapshot | None, world: World) -> Summary:
    parts = build_trained(settings, job, snapshot, world)
    source = {"weights": weights_name(settings, snapshot), "command": job.line}
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, **source}
    if starts_ranks(settings):
        return run_in_ranks(settings, job, parts)
    try:
        with (
            trained_engine(settings, parts, snapshot, world) as engine,
            stop_requests(agree=world.max, patient=world.size > 1) as stops,
        ):
            tally, seconds = evaluate(engine, stops.until_stopped(parts.loader.in_order(settings.split)))
    except StopRequested as request:
        raise request.error(f"stopped by {request.reason}") from request
    return {
        "loss": tally.loss,
        **tally.means,
        "samples": tally.samples,
        "samples_per_second": tally.samples / seconds,
        "seconds": seconds,
        "split": settings.split,
        **source,
    }
