"""CIFAR-10 and CIFAR-100 from their published binary version (the Python version is pickle, and not read).

https://www.cs.toronto.edu/~kriz/cifar.html: files of equal records, each a label or two and an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples
from gpipe_cli.data.keys import check_common_keys
from gpipe_cli.data.sources import find_file, read_bytes
from gpipe_cli.errors import ConfigError, DataError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@final
@dataclass(frozen=True)
class _Edition:
    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    """Bytes before the image; the last of them is the class."""
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_EDITIONS = {
    "cifar10": _Edition(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        labels=1,
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Edition(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        labels=2,
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}
_RECORDS = {"train.bin": 50_000}  # in a file; 10,000 in every other


def build(
    name: str, root: str = "data", size: int | None = None, workers: int = 0, timeout: float | None = None
) -> Data:
    """Images of 3x32x32, or of `size`, from the unpacked archive under `root`."""
    check_common_keys(size, workers, timeout)
    if name not in _EDITIONS:
        raise ConfigError(f"data.name={name}: choose one of {', '.join(_EDITIONS)}")
    edition = _EDITIONS[name]
    train, test = (_read(edition, root, files, size) for files in (edition.train, edition.test))
    return Data(
        train,
        test,
        classes=edition.classes,
        shape=train.shape,
        mean=edition.mean,
        std=edition.std,
        flips=True,
        workers=workers,
        timeout=timeout,
    )


def _read(edition: _Edition, root: str, names: tuple[str, ...], size: int | None) -> ImageSamples:
    cure = f"unpack {edition.archive} of https://www.cs.toronto.edu/~kriz/cifar.html into {root}"
    paths = [find_file(root, edition.folder, name, cure) for name in names]
    records = torch.cat([_records(path, edition) for path in paths])
    images = records[:, edition.labels :].reshape(-1, *_SHAPE)
    return ImageSamples(images, records[:, edition.labels - 1], size=size)


def _records(path: Path, edition: _Edition) -> Tensor:
    length = edition.labels + _PIXELS
    expected = _RECORDS.get(path.name.removesuffix(".gz"), 10_000) * length
    content = read_bytes(path, expected + 1)
    if len(content) != expected:
        raise DataError(f"{path}: {_size(content, expected)} instead of {expected}: not the published file")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, length)
    label = int(records[:, edition.labels - 1].max())
    if label >= edition.classes:
        raise DataError(f"{path}: holds the label {label}, but there are {edition.classes} classes")
    return records


def _size(content: bytearray, expected: int) -> str:
    return f"{len(content)} bytes" if len(content) < expected else f"more than {expected} bytes"
