"""gpipe eval: trained weights on held-out samples, split as asked for: of a run, a snapshot or a file."""

from __future__ import annotations

import time

from torch import nn

from gpipe_cli.commands.assemble import make_engine
from gpipe_cli.commands.chosen import Chosen, choose
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.launching import launched
from gpipe_cli.commands.membership import as_rank, assemble_together, joined, leads, starts_ranks, watched
from gpipe_cli.commands.saved import saved_config, with_overrides
from gpipe_cli.config.load import settings_of
from gpipe_cli.config.schema import Eval
from gpipe_cli.distributed.team import Team
from gpipe_cli.engines.state import EngineState, load_module
from gpipe_cli.errors import RunError
from gpipe_cli.models.weights import load_weights, read_weights
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.signals import INTERRUPT, StopRequested, stop_requests
from gpipe_cli.training.snapshot.contents import tensors_of
from gpipe_cli.training.snapshot.manifest import BUFFERS, MODEL

OWN_KEYS = ("run", "snapshot", "weights", "split")
"""Keys of an evaluation that are not those of its run, even where they have the same name."""


def run(settings: Eval, job: Job) -> Summary:
    chosen = _chosen(settings)
    if chosen is not None:
        settings = _as_trained(chosen, job)
    settings = as_rank(settings, job)
    with joined(settings, job) as team:
        return _evaluated(settings, job, chosen, team)


def _evaluated(settings: Eval, job: Job, chosen: Chosen | None, team: Team) -> Summary:
    parts = assemble_together(settings, job, team)
    weights = _load(parts.model, settings, chosen)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "weights": weights, "command": job.line}

    if starts_ranks(settings):
        return _shown(launched(settings, job, parts, time.monotonic()), job)
    engine = watched(make_engine(settings, parts), job, team)
    try:
        with stop_requests(INTERRUPT, agree=team.largest, patient=team.size > 1) as stops:
            found, seconds = evaluate(engine, stops.heeded(parts.feed.ordered(settings.split)))
    except StopRequested as request:
        raise KeyboardInterrupt from request
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


def _chosen(settings: Eval) -> Chosen | None:
    """The snapshot to evaluate; None where a file of weights is given."""
    for key, value in (("run", settings.run), ("snapshot", settings.snapshot)):
        if value is not None:
            return choose(key, value, (MODEL, BUFFERS))
    return None


def _load(model: nn.Module, settings: Eval, chosen: Chosen | None) -> str:
    """Fill the model; where from."""
    if chosen is None:
        assert settings.weights is not None, "the configuration was checked"
        load_weights(model, read_weights(settings.weights, "weights"), settings.weights, "weights")
        return settings.weights
    path = chosen.snapshot.path / MODEL
    try:
        load_module(
            model, EngineState(tensors_of(chosen.snapshot, MODEL), tensors_of(chosen.snapshot, BUFFERS))
        )
    except RunError as error:
        raise RunError(f"{path}: {error}") from error
    return str(path)


def _as_trained(chosen: Chosen, job: Job) -> Eval:
    """The run's own settings, with what was given for the evaluation in their place."""
    tree = with_overrides(saved_config(chosen.run), job.tree, job.overrides, OWN_KEYS)
    settings = settings_of(tree, job.command, job.overrides)
    assert isinstance(settings, Eval)
    return settings
