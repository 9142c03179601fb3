"""gpipe eval: evaluate trained weights from a run, a snapshot or a file on one split of the data."""

from __future__ import annotations

from gpipe_cli.build.fit import check_isolation
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import EvalConfig
from gpipe_cli.inference.trained import TrainedModel, use_trained, with_saved_settings
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.loop import evaluate


def run(settings: EvalConfig, job: Job) -> Summary:
    with use_trained(with_saved_settings(settings, job), job) as trained:
        summary = _evaluate(trained)
    if job.shows_result and not job.dry_run:
        print_facts("", summary)
    return summary


def _evaluate(trained: TrainedModel[EvalConfig]) -> Summary:
    parts, split = trained.build(), trained.settings.split
    if (summary := trained.run_elsewhere(parts)) is not None:
        return summary
    with trained.engine(parts) as (engine, stops):
        check_isolation(engine, parts.loader.data)
        tally, seconds = evaluate(engine, stops.until_stopped(parts.loader.in_order(split)))
    return {
        "loss": tally.loss,
        **tally.means,
        "samples": tally.samples,
        "samples_per_second": tally.samples / seconds,
        "seconds": seconds,
        "split": split,
        **trained.source,
    }
