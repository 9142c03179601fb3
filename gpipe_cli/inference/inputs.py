"""What `gpipe predict` is given: find images, and read them as training did for evaluation."""

from __future__ import annotations

import glob
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from PIL import Image
from torch import Tensor

from gpipe_cli.data.datasets import resize
from gpipe_cli.data.image_folder import SUFFIXES, center_crop, read_image
from gpipe_cli.data.transforms import Transform
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import DataError
from gpipe_cli.inference.inference_spec import SEGMENTATION, InferenceSpec
from gpipe_cli.pytree import ModelInput


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


def transformed(input: Tensor, transform: Transform | None) -> ModelInput:
    return input if transform is None else transform(input, None)
