"""The masks of a segmentation as PNG files: the value of a pixel is its class, shown in the colors of PASCAL VOC."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import final

import torch
from PIL import Image
from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.run.prediction_input import InputFile
from gpipe_cli.safe_files import writing
from gpipe_cli.training.snapshot.durable import write_file

MAX_COLORS = 256
"""Of a palette; with more classes a mask has 16-bit shades of gray."""


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
