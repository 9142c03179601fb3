"""Run a trained model on files, batch by batch, and turn its outputs into classes, numbers or masks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.data.transforms import Transform
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, DataError, NumericError
from gpipe_cli.losses.measures import main_scores
from gpipe_cli.pytree import ModelInput, flatten, unflatten
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.run.inference_spec import CLASSIFICATION, OTHER, SEGMENTATION, InferenceSpec
from gpipe_cli.run.masks import MaskFolder
from gpipe_cli.run.prediction_input import Images, InputFile, Inputs, PreparedInput
from gpipe_cli.run.table_input import TableRows

Row = dict[str, Any]
"""The prediction for one input, as JSON; with `error` instead if it could not be read."""


@final
@dataclass(frozen=True)
class Predictor:
    engine: Engine
    spec: InferenceSpec
    world: World
    top: int
    masks: MaskFolder | None
    """Where the masks of a segmentation go; only rank 0 writes them."""

    def predict(self, inputs: Inputs, batch_size: int) -> Iterator[Row]:
        """A row per input, in order."""
        for begin in range(0, len(inputs), batch_size):
            batch = range(begin, min(begin + batch_size, len(inputs)))
            samples = [_read(inputs, index) for index in batch]
            # Every rank reads every input. Should one of them fail where rank 0 succeeds, it takes zeros instead:
            # all ranks need batches of the same size.
            errors = [sample if isinstance(sample, str) else None for sample in samples]
            errors = json.loads(self.world.from_rank_zero(json.dumps(errors)))
            tensors = [
                sample.input if isinstance(sample, PreparedInput) else inputs.zeros
                for sample, error in zip(samples, errors, strict=True)
                if error is None
            ]
            outputs = iter(self.engine.predict(_stacked(tensors), self._results) if tensors else ())
            for index, sample, error in zip(batch, samples, errors, strict=True):
                if error is None:
                    yield {**inputs.label(index), **self._row(inputs.file(index), sample, next(outputs))}
                    continue
                if self.world.is_rank_zero:
                    print_status(f"skipped {error}")
                yield {**inputs.label(index), "error": error}

    def _results(self, output: Any) -> Tensor:
        """What the process with the last layer sends to the others: probabilities, numbers, or a class per pixel."""
        scores = _main_output(output)
        if self.spec.task == SEGMENTATION:
            if scores.ndim != 4:
                raise ConfigError(
                    f"model: returns {list(scores.shape)}; a segmentation returns scores [samples, classes, height, "
                    "width]"
                )
            return scores.argmax(1)
        numbers = scores.float().flatten(1) if scores.ndim > 1 else scores.float().unsqueeze(1)
        return numbers.softmax(1) if self._shows_classes(numbers) else numbers

    def _shows_classes(self, scores: Tensor) -> bool:
        """A single score has no other to compare it with: it is shown as a number."""
        return self.spec.task == CLASSIFICATION and scores.shape[-1] > 1

    def _row(self, file: InputFile, sample: PreparedInput | str, result: Tensor) -> Row:
        if self.spec.task == SEGMENTATION:
            return self._mask_row(file, sample, result)
        if not result.isfinite().all():
            raise NumericError(f"{file.path}: the model's output is not finite")
        if not self._shows_classes(result):
            return {"outputs": result.tolist()}
        top = result.topk(min(self.top, len(result)))
        return {
            "classes": [
                {"class": self._name(index), "index": index, "probability": probability}
                for probability, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        }

    def _mask_row(self, file: InputFile, sample: PreparedInput | str, classes: Tensor) -> Row:
        """The classes with the most pixels, and the file of the mask."""
        pixels = torch.bincount(classes.flatten())
        top = pixels.topk(min(self.top, int((pixels > 0).sum())))
        row: Row = {
            "classes": [
                {"class": self._name(index), "index": index, "share": count / classes.numel()}
                for count, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        }
        if self.masks is not None and isinstance(sample, PreparedInput):
            row = {"mask": str(self.masks.write(file, classes, sample.size)), **row}
        return row

    def _name(self, index: int) -> str:
        names = self.spec.class_names
        return str(index) if names is None or index >= len(names) else names[index]


def open_inputs(spec: InferenceSpec, files: list[InputFile], transform: Transform | None) -> Inputs:
    """The files as inputs of a model."""
    if spec.feature_names is not None:
        return TableRows(spec.feature_names, files, transform)
    if spec.task == OTHER or len(spec.shape) != 3 or spec.shape[0] not in (1, 3):
        shape = "x".join(map(str, spec.shape))
        raise ConfigError(
            f"input: gpipe predict reads images and CSV files, and the inputs of this model (shape {shape}) are "
            "neither; for text use gpipe generate"
        )
    return Images(spec, files, transform)


def check_out(spec: InferenceSpec, out: str | None) -> None:
    """Check that predictions of this task can be written to `out`."""
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    if spec.task == SEGMENTATION and out is None:
        raise ConfigError("out: give out=<folder>, a new folder for the masks of this segmentation")
    if spec.task != SEGMENTATION and out is not None and Path(out).suffix != ".csv":
        raise ConfigError(f"out={out}: gpipe writes predictions as CSV; give a name that ends in .csv")


def _read(inputs: Inputs, index: int) -> PreparedInput | str:
    """The input, or why it cannot be read."""
    try:
        return inputs.read(index)
    except DataError as error:
        return describe(error)


def _main_output(output: Any) -> Tensor:
    scores = main_scores(output)
    if not isinstance(scores, Tensor):
        raise ConfigError(f"model: returns a {type(scores).__name__}; gpipe predict needs a tensor")
    return scores.detach()


def _stacked(inputs: Sequence[ModelInput]) -> ModelInput:
    rows = [flatten(input, "input") for input in inputs]
    stacked: ModelInput = unflatten(
        rows[0][1], [torch.stack(column) for column in zip(*(tensors for tensors, _ in rows), strict=True)]
    )
    return stacked
