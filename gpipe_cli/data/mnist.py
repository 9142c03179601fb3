"""MNIST from its four published files, as they are or compressed.

Their format, idx, is a magic number that tells the dimensions, the length of each, and the bytes.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples
from gpipe_cli.data.keys import check_common_keys
from gpipe_cli.data.sources import find_file, read_bytes
from gpipe_cli.errors import DataError
from gpipe_cli.values import check_whole_number

_FOLDER = "mnist"
_BYTES = 0x08  # the idx code of unsigned bytes
_LARGEST = 2**30  # bytes; the largest file of the set has 47 million


def build(
    root: str = "data",
    size: int | None = None,
    channels: int = 3,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    """Images of 28x28, or of `size`, with their grey repeated in `channels`."""
    check_common_keys(size, workers, timeout)
    check_whole_number("data.channels", channels, least=1)
    train, test = (_read(root, part, size, channels) for part in ("train", "t10k"))
    return Data(
        train,
        test,
        classes=10,
        shape=train.shape,
        mean=(0.1307,) * channels,
        std=(0.3081,) * channels,
        workers=workers,
        timeout=timeout,
    )


def _read(root: str, part: str, size: int | None, channels: int) -> ImageSamples:
    cure = f"put the four files of MNIST, compressed or not, into {Path(root) / _FOLDER}"
    images_path = find_file(root, _FOLDER, f"{part}-images-idx3-ubyte", cure)
    labels_path = find_file(root, _FOLDER, f"{part}-labels-idx1-ubyte", cure)
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels for {len(images)} images in {images_path.name}")
    if labels.numel() and int(labels.max()) > 9:
        raise DataError(f"{labels_path}: holds the label {int(labels.max())}, but there are 10 classes")
    return ImageSamples(images.unsqueeze(1), labels, size=size, channels=channels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """A tensor of bytes from an idx file of that many dimensions."""
    content = read_bytes(path, _LARGEST)
    header = 4 + 4 * dimensions
    if len(content) < header or tuple(content[:4]) != (0, 0, _BYTES, dimensions):
        raise DataError(f"{path}: not an idx file of bytes in {dimensions} dimensions")
    lengths = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if len(content) - header != prod(lengths):
        raise DataError(
            f"{path}: {len(content) - header} bytes of data instead of {prod(lengths)}: damaged or cut short"
        )
    if not prod(lengths):
        raise DataError(f"{path}: holds no data")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(lengths)
