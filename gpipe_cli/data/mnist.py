"""MNIST from its four published files, compressed or not.

Their format, idx, is a magic number with the number of dimensions, the length of each dimension, and the bytes.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples, check_common_keys, find_file, read_bytes
from gpipe_cli.errors import DataError
from gpipe_cli.values import check_whole_number

_FOLDER = "mnist"
_BYTES = 0x08  # idx code for unsigned bytes
_MAX_BYTES = 2**30  # bytes; the largest file of the set has 47 million


def build(
    root: str = "data",
    size: int | None = None,
    channels: int = 3,
    workers: int = 0,
    timeout: float | None = None,
) -> Data:
    """Read images of 28x28, or scaled to `size`, and repeat their grey in `channels`."""
    check_common_keys(size, workers, timeout)
    check_whole_number("data.channels", channels, least=1)
    train, test = (_read(root, split, size, channels) for split in ("train", "t10k"))
    return Data(
        train,
        test,
        classes=10,
        shape=train.shape,
        mean=(0.1307,) * channels,
        std=(0.3081,) * channels,
        workers=workers,
        timeout=timeout,
        class_names=tuple("0123456789"),
    )


def _read(root: str, split: str, size: int | None, channels: int) -> ImageSamples:
    cure = f"put the four files of MNIST, compressed or not, into {Path(root) / _FOLDER}"
    images_path = find_file(root, _FOLDER, f"{split}-images-idx3-ubyte", cure)
    labels_path = find_file(root, _FOLDER, f"{split}-labels-idx1-ubyte", cure)
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels for {len(images)} images in {images_path.name}")
    if labels.numel() and int(labels.max()) > 9:
        raise DataError(f"{labels_path}: has the label {int(labels.max())}, but there are 10 classes")
    return ImageSamples(images.unsqueeze(1), labels, size=size, channels=channels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of bytes with this many dimensions."""
    content = read_bytes(path, _MAX_BYTES)
    header = 4 + 4 * dimensions
    if len(content) < header or tuple(content[:4]) != (0, 0, _BYTES, dimensions):
        raise DataError(f"{path}: not an idx file of bytes in {dimensions} dimensions")
    lengths = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if len(content) - header != prod(lengths):
        raise DataError(
            f"{path}: {len(content) - header} bytes of data instead of {prod(lengths)}: damaged or truncated"
        )
    if not prod(lengths):
        raise DataError(f"{path}: has no data")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(lengths)
