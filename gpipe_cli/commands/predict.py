"""gpipe predict: classes, masks or numbers for images, from a run, a snapshot or a file of weights."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from gpipe_cli.activity import activity
from gpipe_cli.build.loader import make_loader
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import PredictConfig
from gpipe_cli.config.words import override_group
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.inference.inference_spec import SEGMENTATION, InferenceSpec
from gpipe_cli.inference.predictor import (
    MaskFolder,
    Predictor,
    Row,
    check_out,
    check_readable,
    find_files,
    open_inputs,
)
from gpipe_cli.inference.trained import TrainedModel, saved_spec, use_trained, with_saved_settings
from gpipe_cli.launch.rank import is_main_process, is_rank
from gpipe_cli.report.output import print_status, print_text
from gpipe_cli.report.tables import csv_text, print_predictions
from gpipe_cli.runs.snapshots.durable import write_file
from gpipe_cli.safe_files import writing


def run(settings: PredictConfig, job: Job) -> Summary:
    spec = saved_spec(settings)
    _check_data_keys(job, spec)
    # With a spec the data is not built, so nothing of it has to be allowed.
    settings = with_saved_settings(settings, job, ignored=() if spec is None else ("data", "allow"))
    with use_trained(replace(settings, data_parallel=1), job) as trained:
        summary = _predict(trained, spec)
    if job.rank is None and is_main_process() and not job.dry_run:
        _show(summary, settings, job)
    return summary


def _check_data_keys(job: Job, spec: InferenceSpec | None) -> None:
    for word in job.overrides:
        if spec is not None and override_group(word) == "data":
            raise ConfigError(
                f"{word}: has no effect, because how to prepare inputs was saved with the weights; remove it"
            )


def _predict(trained: TrainedModel[PredictConfig], spec: InferenceSpec | None) -> Summary:
    settings, world = trained.settings, trained.world
    files = find_files(settings.input, world)
    spec = InferenceSpec.of(settings, make_loader(settings)) if spec is None else spec
    check_readable(spec)
    if not is_rank():
        check_out(spec, settings.out)
    parts = trained.build(spec.data())
    inputs = open_inputs(spec, files, parts.loader.transforms.test)
    if (summary := trained.run_elsewhere(parts, inputs=len(inputs))) is not None:
        return summary
    masks = None
    if spec.task == SEGMENTATION and world.is_rank_zero:
        masks = MaskFolder.create(Path(str(settings.out)))
    began = time.perf_counter()
    with trained.engine(parts) as (engine, stops):
        predictor = Predictor(engine, spec, world, settings.top, masks)
        predicted = stops.until_stopped(predictor.predict(inputs, settings.batch_size))
        rows: list[Row] = []
        activity.now(lambda: f"predicting, {len(rows)} of {len(inputs)} inputs done")
        rows.extend(predicted)
    failed = [row for row in rows if "error" in row]
    return {
        "predictions": [row for row in rows if "error" not in row],
        "failed": failed,
        "seconds": time.perf_counter() - began,
        **trained.source,
    }


def _show(summary: Summary, settings: PredictConfig, job: Job) -> None:
    """Print the predictions, or write them to a file; then raise DataError if a file could not be read."""
    predictions: list[Row] = summary["predictions"]
    failed: list[Row] = summary["failed"]
    # A folder has the masks already.
    out = None if settings.out is None or Path(settings.out).is_dir() else Path(settings.out)
    if out is not None:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_file(out, [csv_text(predictions).encode(errors="surrogateescape")], replace=False)
        print_status(f"{len(predictions)} predictions in {out}")
    if job.json and not job.in_sweep and failed:  # otherwise the caller prints the summary
        sys.stdout.write(f"{json.dumps(summary)}\n")
    elif job.shows_result and out is None and predictions:
        print_predictions(predictions) if sys.stdout.isatty() else print_text(csv_text(predictions))
    if failed:
        total = len(failed) + len(predictions)
        raise DataError(f"{len(failed)} of {total} inputs could not be read; the lines above name them")
