"""Run a trained model on files, batch by batch, and turn its outputs into classes, numbers or masks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, DataError, NumericError
from gpipe_cli.losses.measures import scores_of
from gpipe_cli.pytree import ModelInput, flatten, unflatten
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.run.inference_spec import CLASSIFICATION, SEGMENTATION, InferenceSpec
from gpipe_cli.run.masks import MaskFolder
from gpipe_cli.run.prediction_input import ImageReader, InputFile, PreparedImage

Row = dict[str, Any]
"""The prediction for one file, as JSON; with `error` instead for a file that could not be read."""


@final
@dataclass(frozen=True)
class Predictor:
    engine: Engine
    spec: InferenceSpec
    reader: ImageReader
    world: World
    top: int
    masks: MaskFolder | None
    """Where the masks of a segmentation go; only rank 0 writes them."""

    def predict(self, files: Sequence[InputFile], batch_size: int) -> Iterator[Row]:
        """A row per file, in order."""
        for begin in range(0, len(files), batch_size):
            batch = files[begin : begin + batch_size]
            images = [self._read(file) for file in batch]
            # Every rank reads every file. Should one of them fail where rank 0 succeeds, it takes zeros instead:
            # all ranks need batches of the same size.
            errors = [image if isinstance(image, str) else None for image in images]
            errors = json.loads(self.world.from_rank_zero(json.dumps(errors)))
            inputs = [
                image.input if isinstance(image, PreparedImage) else self.reader.zeros
                for image, error in zip(images, errors, strict=True)
                if error is None
            ]
            outputs = iter(self.engine.predict(_stacked(inputs), self._results) if inputs else ())
            for file, image, error in zip(batch, images, errors, strict=True):
                if error is not None:
                    if self.world.is_rank_zero:
                        print_status(f"skipped {error}")
                    yield {"file": str(file.path), "error": error}
                else:
                    yield {"file": str(file.path), **self._row(file, image, next(outputs))}

    def _read(self, file: InputFile) -> PreparedImage | str:
        try:
            return self.reader.read(file.path)
        except DataError as error:
            return describe(error)

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

    def _row(self, file: InputFile, image: PreparedImage | str, result: Tensor) -> Row:
        if self.spec.task == SEGMENTATION:
            return self._mask_row(file, image, result)
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

    def _mask_row(self, file: InputFile, image: PreparedImage | str, classes: Tensor) -> Row:
        """The classes with the most pixels, and the file of the mask."""
        pixels = torch.bincount(classes.flatten())
        top = pixels.topk(min(self.top, int((pixels > 0).sum())))
        row: Row = {
            "classes": [
                {"class": self._name(index), "index": index, "share": count / classes.numel()}
                for count, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        }
        if self.masks is not None and isinstance(image, PreparedImage):
            row = {"mask": str(self.masks.write(file, classes, image.height, image.width)), **row}
        return row

    def _name(self, index: int) -> str:
        names = self.spec.class_names
        return str(index) if names is None or index >= len(names) else names[index]


def check_out(spec: InferenceSpec, out: str | None) -> None:
    """Check that predictions of this task can be written to `out`."""
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    if spec.task == SEGMENTATION and out is None:
        raise ConfigError("out: give out=<folder>, a new folder for the masks of this segmentation")
    if spec.task != SEGMENTATION and out is not None and Path(out).suffix != ".csv":
        raise ConfigError(f"out={out}: gpipe writes predictions as CSV; give a name that ends in .csv")


def _main_output(output: Any) -> Tensor:
    """The logits of a model of transformers; of a tuple or dict, the first, as for loss=auxiliary."""
    scores = scores_of(output)
    if isinstance(scores, Mapping):
        scores = next(iter(scores.values()))
    if isinstance(scores, tuple):
        scores = scores[0]
    if not isinstance(scores, Tensor):
        raise ConfigError(f"model: returns a {type(scores).__name__}; gpipe predict needs a tensor")
    return scores.detach()


def _stacked(inputs: Sequence[ModelInput]) -> ModelInput:
    rows = [flatten(input, "input") for input in inputs]
    stacked: ModelInput = unflatten(
        rows[0][1], [torch.stack(column) for column in zip(*(tensors for tensors, _ in rows), strict=True)]
    )
    return stacked
