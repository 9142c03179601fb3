"""gpipe eval: a trained run's newest weights on its held-out samples, split as asked for."""

from __future__ import annotations

from gpipe_cli.commands.assemble import (
    check_components,
    make_engine,
    make_model,
    make_objective,
    open_current_folder,
    split_model,
)
from gpipe_cli.commands.feed import make_feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.saved import saved_config, with_overrides
from gpipe_cli.config.load import settings_of
from gpipe_cli.config.schema import Eval
from gpipe_cli.report.partitions import partition_rows, print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.interrupts import interrupts
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.snapshot import load_weights, newest_weights


def run(settings: Eval, job: Job) -> Summary:
    assert settings.run is not None, "the configuration was checked"
    weights = newest_weights(settings.run)
    settings = _as_trained(settings.run, job)
    open_current_folder(settings)
    check_components(settings, job.overrides)
    feed = make_feed(settings)
    model = make_model(settings, feed.classes)
    load_weights(model, weights)
    split = split_model(settings, model, feed)
    partitions = partition_rows(model, split.balance, split.devices)
    if job.dry_run:
        if not job.json:
            print_partitions(partitions)
        return {"partitions": partitions, "weights": str(weights), "command": job.line}

    engine = make_engine(settings, model, split, make_objective(settings))
    try:
        with interrupts() as ctrl_c:
            found, seconds = evaluate(engine, ctrl_c.heeded(feed.ordered(settings.split)))
    finally:
        engine.close()
    summary = {
        "loss": found.loss,
        "top1": found.means.get("top1"),
        **{name: value for name, value in found.means.items() if name != "top1"},
        "samples": found.samples,
        "samples_per_second": found.samples / seconds,
        "seconds": seconds,
        "split": settings.split,
        "weights": str(weights),
        "command": job.line,
    }
    if job.shows_result:
        print_facts("", summary)
    return summary


def _as_trained(run: str, job: Job) -> Eval:
    """The run's own settings, with what was given for the evaluation in their place."""
    tree = with_overrides(saved_config(run), job.tree, job.overrides)
    settings = settings_of(tree, job.command, job.overrides)
    assert isinstance(settings, Eval)
    return settings
