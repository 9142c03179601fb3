"""What `gpipe predict` is given: find images and CSV files, and read them as training did for evaluation."""

from __future__ import annotations

import glob
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from PIL import Image
from torch import Tensor

from gpipe_cli.data.csv_table import open_table
from gpipe_cli.data.datasets import resize
from gpipe_cli.data.image_folder import SUFFIXES, center_crop, read_image
from gpipe_cli.data.transforms import Transform
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import DataError
from gpipe_cli.inference.spec import SEGMENTATION, InferenceSpec
from gpipe_cli.pytree import ModelInput

DELIMITERS = (",", ";", "\t")


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
    size: tuple[int, int] = (0, 0)
    """Width and height of an image, as it is in its file."""


class Inputs(Protocol):
    """What to predict, by index."""

    def __len__(self) -> int: ...

    def file(self, index: int) -> InputFile: ...

    def label(self, index: int) -> dict[str, Any]:
        """What tells it from the others, as JSON."""

    def read(self, index: int) -> PreparedInput:
        """Raise DataError if it cannot be read."""

    @property
    def zeros(self) -> ModelInput:
        """The input of a sample that only another process could read."""


def find_files(given: Any, world: World) -> list[InputFile]:
    """All files of a path, a pattern or a list of them; of a folder, the images in it and in the folders below.

    Every rank gets those that rank 0 finds: a folder may change.
    """
    paths = given if isinstance(given, list) else [given]
    files = dict.fromkeys(file for path in paths for file in _find(str(path)))
    shared = json.loads(
        world.from_rank_zero(json.dumps([[str(file.path), str(file.below)] for file in files]))
    )
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

    def label(self, index: int) -> dict[str, Any]:
        return {"file": str(self._files[index].path)}

    @property
    def zeros(self) -> ModelInput:
        return transformed(torch.zeros(self._channels, self._height, self._width), self._transform)

    def read(self, index: int) -> PreparedInput:
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


def transformed(input: Tensor, transform: Transform | None) -> ModelInput:
    return input if transform is None else transform(input, None)


@final
class TableRows:
    """The rows of CSV files: the columns that the model was trained with, found by their names."""

    def __init__(
        self, features: tuple[str, ...], files: list[InputFile], transform: Transform | None
    ) -> None:
        self._features, self._transform = features, transform
        self._rows: list[tuple[InputFile, int, Tensor | DataError]] = []
        for file in files:
            self._read(file)

    def __len__(self) -> int:
        return len(self._rows)

    def file(self, index: int) -> InputFile:
        return self._rows[index][0]

    def label(self, index: int) -> dict[str, Any]:
        file, line, _ = self._rows[index]
        return {"file": str(file.path), "line": line}

    @property
    def zeros(self) -> ModelInput:
        return transformed(torch.zeros(len(self._features)), self._transform)

    def read(self, index: int) -> PreparedInput:
        row = self._rows[index][2]
        if isinstance(row, DataError):
            raise row
        return PreparedInput(transformed(row, self._transform))

    def _read(self, file: InputFile) -> None:
        delimiter, header = self._format(file)
        with open_table("input", str(file.path), delimiter, header=header) as table:
            columns = [table.column("input", name) for name in self._features]
            for row in table.rows():
                try:
                    value: Tensor | DataError = torch.tensor(table.numbers(row, columns))
                except DataError as error:
                    value = error
                self._rows.append((file, row.line, value))

    def _format(self, file: InputFile) -> tuple[str, bool]:
        """The first delimiter with which the file has all columns; without a header, columns are called by number."""
        numbered = all(name.isdecimal() for name in self._features)
        formats = [
            (delimiter, header) for header in (True, False) if header or numbered for delimiter in DELIMITERS
        ]
        problem: DataError | None = None
        for delimiter, header in formats:
            try:
                with open_table("input", str(file.path), delimiter, header=header) as table:
                    if set(self._features) <= set(table.columns):
                        return delimiter, header
                    problem = problem or self._lacks(file, table.columns)
            except DataError as error:
                problem = problem or DataError(f"{error}; this model takes the rows of CSV files")
        assert problem is not None, "there is a format"
        raise problem

    def _lacks(self, file: InputFile, columns: Sequence[str]) -> DataError:
        name = next(name for name in self._features if name not in columns)
        return DataError(
            f"input={file.path}: lacks the column '{name}', which the model was trained with; it has "
            f"{', '.join(columns[:20])}"
        )
