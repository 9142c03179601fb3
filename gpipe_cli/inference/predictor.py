"""Run a trained model on files, batch by batch, and turn its outputs into classes, numbers or masks.

Images are found among the paths that `gpipe predict` is given, and read as training read them for evaluation. A
classifier of texts takes files with a text per row.
"""

from __future__ import annotations

import glob
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from PIL import Image
from torch import Tensor

from gpipe_cli.data.datasets import resize
from gpipe_cli.data.image_folder import SUFFIXES, center_crop, read_image
from gpipe_cli.data.texts import text_inputs
from gpipe_cli.data.transforms import Transform
from gpipe_cli.distributed.world import World
from gpipe_cli.engines.protocol import Engine
from gpipe_cli.errors import ConfigError, DataError, NumericError
from gpipe_cli.inference.inference_spec import CLASSIFICATION, OTHER, SEGMENTATION, InferenceSpec
from gpipe_cli.losses.measures import main_scores
from gpipe_cli.pytree import ModelInput, flatten, unflatten
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.snapshots.durable import write_file
from gpipe_cli.safe_files import writing

Row = dict[str, Any]
"""The prediction for one input, as JSON; with `error` instead if it could not be read."""
MAX_COLORS = 256
"""How many colors a palette has at most; with more classes a mask has 16-bit shades of gray."""


@final
@dataclass(frozen=True)
class InputFile:
    path: Path
    below: Path
    """The path relative to the folder that was given, or the name of a file that was given itself."""


@final
@dataclass(frozen=True)
class PreparedInput:
    input: ModelInput
    size: tuple[int, int]
    """Width and height of the image, as it is in its file."""


def find_files(given: Any, world: World) -> list[InputFile]:
    """All files of a path, a pattern or a list of them; of a folder, the images in it and in the folders below.

    Every rank gets those that rank 0 finds: a folder may change.
    """
    paths = given if isinstance(given, list) else [given]
    files = dict.fromkeys(file for path in paths for file in _find(str(path)))
    shared = world.from_rank_zero([[str(file.path), str(file.below)] for file in files])
    return [InputFile(Path(path), Path(below)) for path, below in shared]


def _find(given: str) -> list[InputFile]:
    path = Path(given)
    if path.is_dir():
        files = [InputFile(image, image.relative_to(path)) for image in _images_below(path)]
        if not files:
            raise DataError(
                f"input={given}: no images ({', '.join(sorted(SUFFIXES))}) in this folder or below it"
            )
        return files
    if os.path.lexists(path):
        return [InputFile(path, Path(path.name))]
    matching = sorted(map(Path, glob.glob(given, recursive=True)))  # noqa: PTH207 - the pattern may be absolute
    files = [InputFile(file, Path(file.name)) for file in matching if not file.is_dir()]
    if not files:
        only_folders = "; the pattern matches only folders" if matching else " or folder"
        raise DataError(f"input={given}: no such file{only_folders}")
    return files


def _images_below(folder: Path) -> list[Path]:
    """Links to folders are not followed: they may lead in circles."""

    def fail(error: OSError) -> None:
        raise DataError(f"input={folder}: cannot be read: {error}") from error

    return sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder, onerror=fail)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    )


@final
class Images:
    """Images with the channels and size of a model's inputs, normalized as in the evaluation."""

    def __init__(self, spec: InferenceSpec, files: list[InputFile], transform: Transform | None) -> None:
        self._channels, self._height, self._width = spec.shape
        self._files, self._transform = files, transform
        # A mask has to cover the whole image, so that is scaled, though not by the same factor in both directions.
        self._stretches = spec.task == SEGMENTATION

    def __len__(self) -> int:
        return len(self._files)

    def file(self, index: int) -> InputFile:
        return self._files[index]

    @property
    def zeros(self) -> ModelInput:
        """The input of a sample that only another process could read."""
        return transformed(torch.zeros(self._channels, self._height, self._width), self._transform)

    def read(self, index: int) -> PreparedInput:
        """Raise DataError if it cannot be read."""
        with warnings.catch_warnings():
            # PIL warns of images above its limit, and refuses only those of twice the limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = read_image(self._files[index].path, self._channels)
        height, width = image.shape[-2:]
        if self._stretches:
            image = resize(image.unsqueeze(0), self._height, self._width).squeeze(0)
        else:
            image = center_crop(image, self._height, self._width)
        return PreparedInput(transformed(image, self._transform), (width, height))


@final
class Texts:
    """The texts of files with rows, as a classifier takes them."""

    def __init__(self, spec: InferenceSpec, files: list[InputFile]) -> None:
        assert spec.text is not None and spec.tokenizer is not None
        self._inputs = [
            text
            for file in files
            for text in text_inputs(file.path, spec.text["field"], spec.tokenizer, spec.shape[0])
        ]

    def __len__(self) -> int:
        return len(self._inputs)

    def file(self, index: int) -> InputFile:
        place = Path(self._inputs[index][0])
        return InputFile(place, place)

    @property
    def zeros(self) -> ModelInput:
        return self._inputs[0][1]

    def read(self, index: int) -> PreparedInput:
        return PreparedInput(self._inputs[index][1], (0, 0))


def transformed(input: Tensor, transform: Transform | None) -> ModelInput:
    return input if transform is None else transform(input, None)


@final
@dataclass(frozen=True)
class Predictor:
    engine: Engine
    spec: InferenceSpec
    world: World
    top: int
    masks: MaskFolder | None
    """Where the masks of a segmentation go; only rank 0 writes them."""

    def predict(self, inputs: Images | Texts, batch_size: int) -> Iterator[Row]:
        """A row per input, in order."""
        for begin in range(0, len(inputs), batch_size):
            batch = range(begin, min(begin + batch_size, len(inputs)))
            samples = [_read(inputs, index) for index in batch]
            # Every rank reads every input. Should one of them fail where rank 0 succeeds, it takes zeros instead:
            # all ranks need batches of the same size.
            errors = [sample if isinstance(sample, str) else None for sample in samples]
            errors = self.world.from_rank_zero(errors)
            tensors = [
                sample.input if isinstance(sample, PreparedInput) else inputs.zeros
                for sample, error in zip(samples, errors, strict=True)
                if error is None
            ]
            outputs = iter(self.engine.predict(_stacked(tensors), self._results) if tensors else ())
            for index, sample, error in zip(batch, samples, errors, strict=True):
                file = inputs.file(index)
                if error is None:
                    yield {"file": str(file.path), **self._row(file, sample, next(outputs))}
                    continue
                if self.world.is_rank_zero:
                    print_status(f"skipped {error}")
                yield {"file": str(file.path), "error": error}

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


def check_readable(spec: InferenceSpec) -> None:
    """Refuse a model that takes neither images nor texts with a class, before it is built."""
    if spec.text is None and (spec.task == OTHER or len(spec.shape) != 3 or spec.shape[0] not in (1, 3)):
        shape = "x".join(map(str, spec.shape))
        raise ConfigError(
            f"input: gpipe predict reads images, and the inputs of this model (shape {shape}) are none; for text use "
            "gpipe generate"
        )


def open_inputs(spec: InferenceSpec, files: list[InputFile], transform: Transform | None) -> Images | Texts:
    """The files as inputs of a model."""
    if spec.text is not None:
        return Texts(spec, files)
    return Images(spec, files, transform)


def check_out(spec: InferenceSpec, out: str | None) -> None:
    """Check that predictions of this task can be written to `out`."""
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"out={out}: exists; give another name, or remove it")
    if spec.task == SEGMENTATION and out is None:
        raise ConfigError("out: give out=<folder>, a new folder for the masks of this segmentation")
    if spec.task != SEGMENTATION and out is not None and Path(out).suffix != ".csv":
        raise ConfigError(f"out={out}: gpipe writes predictions as CSV; give a name that ends in .csv")


def _read(inputs: Images | Texts, index: int) -> PreparedInput | str:
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


@final
class MaskFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: set[Path] = set()

    @staticmethod
    def create(folder: Path) -> MaskFolder:
        if os.path.lexists(folder):
            raise ConfigError(f"out={folder}: exists; give another name, or remove it")
        with writing(folder):
            folder.mkdir(parents=True)
        return MaskFolder(folder)

    def write(self, file: InputFile, classes: Tensor, size: tuple[int, int]) -> Path:
        """Write the mask, scaled to the width and height of its image, and return its path.

        classes: of each pixel, as the model saw it.
        """
        path = self._path(file)
        mask = _image(classes).resize(size, Image.Resampling.NEAREST)
        content = io.BytesIO()
        mask.save(content, "PNG")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, [content.getvalue()], replace=False)
        return path

    def _path(self, file: InputFile) -> Path:
        """a.jpg becomes a.png; a.bmp beside it becomes a.bmp.png."""
        path = self._folder / file.below.with_suffix(".png")
        if path in self._taken:
            path = self._folder / file.below.with_name(f"{file.below.name}.png")
        while path in self._taken:  # files of the same name from several folders
            path = path.with_name(f"{path.stem}_.png")
        self._taken.add(path)
        return path


def palette() -> list[int]:
    """Red, green and blue of each class: the bits of its number, spread over the high bits of the three."""
    return [
        sum((index >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8))
        for index in range(MAX_COLORS)
        for channel in range(3)
    ]


def _image(classes: Tensor) -> Image.Image:
    height, width = classes.shape
    if int(classes.max()) >= MAX_COLORS:
        return Image.frombytes("I;16", (width, height), classes.to(torch.uint16).numpy().tobytes())
    image = Image.frombytes("P", (width, height), classes.to(torch.uint8).numpy().tobytes())
    image.putpalette(palette())
    return image
