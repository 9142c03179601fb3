"""gpipe eval: a trained run's newest weights on its held-out samples, split as asked for."""

from __future__ import annotations

from gpipe_cli.commands.assemble import assemble, make_engine
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.saved import saved_config, with_overrides
from gpipe_cli.config.load import settings_of
from gpipe_cli.config.schema import Eval
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.interrupts import interrupts
from gpipe_cli.training.loop import evaluate
from gpipe_cli.training.snapshot import load_weights, newest_weights


def run(settings: Eval, job: Job) -> Summary:
    assert settings.run is not None, "the configuration was checked"
    weights = newest_weights(settings.run)
    settings = _as_trained(settings.run, job)
    parts = assemble(settings, job.overrides)
    load_weights(parts.model, weights)
    if job.dry_run:
        if not job.json:
            print_partitions(parts.partitions)
        return {"partitions": parts.partitions, "weights": str(weights), "command": job.line}

    engine = make_engine(settings, parts)
    try:
        with interrupts() as ctrl_c:
            found, seconds = evaluate(engine, ctrl_c.heeded(parts.feed.ordered(settings.split)))
    finally:
        engine.close()
    summary = {
        "loss": found.loss,
        **found.means,
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
