"""Images in a folder per class: <root>/<class>/<image>, or <root>/train/<class>/<image> and the same under test or val.

Images are read when they are needed; a broken one is an error that names its file.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import final

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from gpipe_cli.data.datasets import Data, check_size, resize
from gpipe_cli.errors import DataError
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import FilePath

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_HELD_OUT = ("test", "val")
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_MAX_BYTES = 2**28
"""Bytes of an image file: more than PIL's limit on pixels lets through."""


def build(
    root: FilePath = "data/images",
    size: int | None = 224,
    *,
    path: FilePath | None = None,
) -> Data:
    """The classes are the folders under <root>/train, or under <root> itself, in alphabetical order.

    With size=null all images must have the same size. path: another name of root.
    """
    check_size(size)
    train_folder, test_folder = _folders("root" if path is None else "path", root if path is None else path)
    classes = sorted(_class_folders(train_folder))
    train = FolderSamples(train_folder, classes, size)
    test = None if test_folder is None else FolderSamples(test_folder, classes, size)
    return Data(
        train,
        test,
        classes=len(classes),
        shape=tuple(train[0][0].shape),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        flips=True,
        class_names=tuple(classes),
    )


@final
class FolderSamples:
    def __init__(self, folder: Path, classes: list[str], size: int | None) -> None:
        self._size = size
        unknown = _class_folders(folder) - set(classes)
        if unknown:
            raise DataError(f"{folder}: {', '.join(sorted(unknown))}: not a class under train")
        self._files = [
            (path, target) for target, name in enumerate(classes) for path in _images(folder / name)
        ]
        if not self._files:
            raise DataError(f"{folder}: no images ({', '.join(sorted(SUFFIXES))}) in its class folders")

    @property
    def targets(self) -> list[int]:
        return [target for _, target in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, target = self._files[index]
        image = read_image(path)
        return (image if self._size is None else center_crop(image, self._size)), target


def _folders(key: str, root: str) -> tuple[Path, Path | None]:
    """Where the class folders of the training images are, and those of the test images if there are any."""
    given, folder = f"data.{key}={root}", Path(root)
    if not folder.is_dir():
        raise DataError(f"{given}: is not a folder; put a folder of images per class there")
    names = _class_folders(folder)
    if names.isdisjoint(("train", *_HELD_OUT)):
        if not names:
            images = sum(path.suffix.lower() in SUFFIXES for path in folder.iterdir())
            has = f"{images} images but no folders" if images else "no folders"
            raise DataError(f"{given}: has {has}; put the images of each class into a folder named after it")
        empty = sorted(name for name in names if not _images(folder / name))
        if empty:
            raise DataError(f"{given}: its folder {empty[0]} has no images; move it elsewhere")
        return folder, None
    train = folder / "train"
    if not train.is_dir():
        raise DataError(f"{given}: {train} is missing; put a folder of images per class there")
    if not _class_folders(train):
        raise DataError(f"{given}: {train} has no folders; put a folder of images per class there")
    return train, next((folder / name for name in _HELD_OUT if name in names), None)


def _class_folders(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error}") from error


def _images(folder: Path) -> list[Path]:
    # Sorted, because file systems list files in different orders.
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def read_image(path: Path, channels: int = 3) -> Tensor:
    """The image as [channels, height, width] from 0 to 1; channels: 3, or 1 for shades of gray."""
    try:
        content = read_regular(path, _MAX_BYTES)
        # Only some formats: the decoder of another may start programs, as that of EPS does.
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return image_to_tensor(image, channels)
    except UnidentifiedImageError as error:  # whose message names a buffer in memory
        raise DataError(f"{path}: not a readable image (unknown format)") from error
    except Exception as error:  # on damaged bytes a decoder may raise nearly anything
        raise DataError(f"{path}: not a readable image ({error})") from error


def center_crop(image: Tensor, height: int, width: int | None = None) -> Tensor:
    """Crop the middle, a square if `width` is not given, and scale it, so that nothing is stretched."""
    width = height if width is None else width
    scale = min(image.shape[-2] / height, image.shape[-1] / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (image.shape[-2] - rows) // 2, (image.shape[-1] - columns) // 2
    middle = image[:, top : top + rows, left : left + columns]
    return resize(middle.unsqueeze(0), height, width).squeeze(0)


def image_to_tensor(image: Image.Image, channels: int = 3) -> Tensor:
    """Return the colors of an image from 0 to 1 as [channels, height, width]."""
    pixels = image.convert({1: "L", 3: "RGB"}[channels])
    flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
    return flat.view(pixels.height, pixels.width, channels).permute(2, 0, 1).float().div_(255)
