"""gpipe eval: trained weights on held-out samples, split as asked for: of a run, a snapshot or a file."""

from __future__ import annotations

import time
from pathlib import Path

from gpipe_cli.config.load import settings_of
from gpipe_cli.config.schema import EvalConfig
from gpipe_cli.distributed.team import Team
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.away import keeps_on_disk
from gpipe_cli.run.build import make_engine
from gpipe_cli.run.chosen import Chosen, choose
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.launcher import launched
from gpipe_cli.run.rank_setup import as_rank, assemble_together, joined, leads, starts_ranks, watched
from gpipe_cli.run.saved_run import saved_config, with_overrides
from gpipe_cli.run.weights import fill, fill_slice_by_slice
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.signals import StopRequested, stop_requests
from gpipe_cli.training.snapshot.finding import is_snapshot, run_of, snapshot_paths
from gpipe_cli.training.snapshot.manifest import BUFFERS, MODEL

OWN_KEYS = ("run", "snapshot", "weights", "split")
"""Keys of an evaluation that are not those of its run, even where they have the same name."""


def run(settings: EvalConfig, job: Job) -> Summary:
    trained = _as_trained(settings, job)
    chosen = _chosen(settings, large=trained is not None and keeps_on_disk(trained))
    settings = settings if trained is None else trained
    settings = as_rank(settings, job)
    with joined(settings, job) as team:
        return _evaluated(settings, job, chosen, team)


def _evaluated(settings: EvalConfig, job: Job, chosen: Chosen | None, team: Team) -> Summary:
    parts = assemble_together(settings, job, team)
    weights = str(settings.weights if chosen is None else chosen.snapshot.path / MODEL)
    in_memory = not keeps_on_disk(settings)
    if in_memory:
        fill(parts.model, settings.weights, chosen)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "weights": weights, "command": job.line}

    if starts_ranks(settings):
        return _shown(launched(settings, job, parts, time.monotonic()), job)
    engine = watched(make_engine(settings, parts), job, team)
    try:
        if not in_memory:
            fill_slice_by_slice(engine, parts.model, settings.weights, chosen)
        with stop_requests(agree=team.largest, patient=team.size > 1) as stops:
            found, seconds = evaluate(engine, stops.heeded(parts.feed.ordered(settings.split)))
    except StopRequested as request:
        raise request.error(f"stopped by {request.reason}") from request
    finally:
        engine.close()
    summary = {
        "loss": found.loss,
        **found.means,
        "samples": found.samples,
        "samples_per_second": found.samples / seconds,
        "seconds": seconds,
        "split": settings.split,
        "weights": weights,
        "command": job.line,
    }
    return _shown(summary, job)


def _shown(summary: Summary, job: Job) -> Summary:
    if job.shows_result and leads():
        print_facts("", summary)
    return summary


def _chosen(settings: EvalConfig, *, large: bool) -> Chosen | None:
    """The snapshot to evaluate, in memory unless it is large; None where a file of weights is given."""
    for key, value in (("run", settings.run), ("snapshot", settings.snapshot)):
        if value is not None:
            return choose(key, value, () if large else (MODEL, BUFFERS))
    return None


def _as_trained(settings: EvalConfig, job: Job) -> EvalConfig | None:
    """The run's own settings, with what was given for the evaluation in their place; None where there is no run."""
    path = settings.run or settings.snapshot
    run = None if path is None else run_of(Path(path)) if is_snapshot(Path(path)) else Path(path)
    if run is None or not snapshot_paths(run):  # whoever chooses a snapshot will say what is wrong
        return None
    tree = with_overrides(saved_config(run), job.tree, job.overrides, OWN_KEYS)
    found = settings_of(tree, job.command, job.overrides)
    assert isinstance(found, EvalConfig)
    return found
