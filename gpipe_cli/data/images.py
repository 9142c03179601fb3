"""The image sets that gpipe reads itself: CIFAR and MNIST from their published files, and the digits in the package.

CIFAR is read from its binary version (https://www.cs.toronto.edu/~kriz/cifar.html), files of equal records, each a
label or two and an image, or from the version for Python, which torchvision downloads: pickled dicts, of which gpipe
takes the arrays and runs nothing. MNIST is read from its four files, compressed
or not. Their format, idx, is a magic number with the number of dimensions, the length of each dimension, and the bytes.
The 1,797 handwritten digits of the UCI repository (see files/digits.txt) are small and real, so that a first run needs
no download.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples, check_size, find_file, read_bytes
from gpipe_cli.data.pickled_arrays import byte_rows, read_pickled_dict
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.values import FilePath, check_whole_number

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORDS = {"train": 50_000}  # per file; every other file has 10,000
_PICKLED_EXTRA = 256  # bytes that a pickled file may have per image, for its name and label
_MNIST_FOLDER = "mnist"
_MAX_BYTE = 255
_IDX_BYTES = 0x08  # idx code for unsigned bytes
_MAX_IDX_BYTES = 2**30  # bytes; the largest file of the set has 47 million
_DIGITS_FILE = Path(__file__).parent / "files" / "digits.safetensors"
_DIGITS_WHITE = 16  # each pixel counts the dark pixels in a block of 4x4
_HELD_OUT = 5  # every fifth digit of each class
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@final
@dataclass(frozen=True)
class _Cifar:
    archive: str
    """`{}` is binary or python."""
    folder: str
    pickled_folder: str
    train: tuple[str, ...]
    """Files, in the binary version with the suffix .bin."""
    test: tuple[str, ...]
    labels: int
    """Bytes before the image; the last of them is the class."""
    label_key: str
    """Where a pickled file has the classes."""
    classes: tuple[str, ...]
    """Their names, in the order of the labels."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFARS = {
    "cifar10": _Cifar(
        archive="cifar-10-{}.tar.gz",
        folder="cifar-10-batches-bin",
        pickled_folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        labels=1,
        label_key="labels",
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Cifar(
        archive="cifar-100-{}.tar.gz",
        folder="cifar-100-binary",
        pickled_folder="cifar-100-python",
        train=("train",),
        test=("test",),
        labels=2,
        label_key="fine_labels",
        classes=tuple(_CIFAR100.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def build_cifar(name: str, root: FilePath = "data", size: int | None = None) -> Data:
    """Read CIFAR-10 or CIFAR-100: images of 3x32x32, or scaled to `size`, from the unpacked archive under `root`."""
    check_size(size)
    if name not in _CIFARS:
        raise ConfigError(f"data.name={name}: choose one of {', '.join(_CIFARS)}")
    variant = _CIFARS[name]
    train, test = (_read_cifar(variant, root, files, size) for files in (variant.train, variant.test))
    return Data(
        train,
        test,
        classes=len(variant.classes),
        shape=train.shape,
        mean=variant.mean,
        std=variant.std,
        flips=True,
        class_names=variant.classes,
    )


def _read_cifar(variant: _Cifar, root: str, names: tuple[str, ...], size: int | None) -> ImageSamples:
    hint = (
        f"unpack {variant.archive.format('binary')} from https://www.cs.toronto.edu/~kriz/cifar.html into {root}, or "
        f"{variant.archive.format('python')}, which torchvision downloads"
    )
    folder, suffix, read = variant.folder, ".bin", _cifar_records
    if not (Path(root) / folder).is_dir() and (Path(root) / variant.pickled_folder).is_dir():
        folder, suffix, read = variant.pickled_folder, "", _pickled_records
    paths = [find_file(root, folder, f"{name}{suffix}", hint) for name in names]
    parts = [
        read(path, variant, _CIFAR_RECORDS.get(name, 10_000)) for path, name in zip(paths, names, strict=True)
    ]
    for path, part in zip(paths, parts, strict=True):
        if (label := int(part.labels.max())) >= len(variant.classes):
            raise DataError(f"{path}: has the label {label}, but there are {len(variant.classes)} classes")
    images = torch.cat([part.images for part in parts]).reshape(-1, *_CIFAR_SHAPE)
    return ImageSamples(images, torch.cat([part.labels for part in parts]), size=size)


@final
@dataclass(frozen=True)
class _Records:
    """The content of one file."""

    images: Tensor
    """One image per row."""
    labels: Tensor


def _cifar_records(path: Path, variant: _Cifar, count: int) -> _Records:
    length = variant.labels + prod(_CIFAR_SHAPE)
    expected = count * length
    content = read_bytes(path, expected + 1)
    if len(content) != expected:
        size = f"{len(content)} bytes" if len(content) < expected else f"more than {expected} bytes"
        raise DataError(f"{path}: has {size} instead of {expected}: not the published file")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, length)
    return _Records(records[:, variant.labels :], records[:, variant.labels - 1])


def _pickled_records(path: Path, variant: _Cifar, count: int) -> _Records:
    columns = prod(_CIFAR_SHAPE)
    limit = count * (2 * columns + _PICKLED_EXTRA)  # Python 3 may have written a byte as two
    content = read_bytes(path, limit + 1)
    if len(content) > limit:
        raise DataError(f"{path}: has more than {limit} bytes: not the published file")
    values = read_pickled_dict(content, path)
    images, labels = byte_rows(values.get("data")), values.get(variant.label_key)
    if images is None or images.shape != (count, columns):
        raise DataError(f"{path}: data is not an array of {count} images as bytes: not the published file")
    if not isinstance(labels, list) or len(labels) != count or not all(type(each) is int for each in labels):
        raise DataError(f"{path}: {variant.label_key} has not {count} classes: not the published file")
    if min(labels) < 0 or max(labels) > _MAX_BYTE:
        raise DataError(
            f"{path}: {variant.label_key} has the label {max(labels, key=abs)}: not the published file"
        )
    return _Records(images, torch.tensor(labels, dtype=torch.uint8))


def build_mnist(root: FilePath = "data", size: int | None = None, channels: int = 3) -> Data:
    """Read MNIST: images of 28x28, or scaled to `size`, and repeat their grey in `channels`."""
    check_size(size)
    check_whole_number("data.channels", channels, least=1)
    train, test = (_read_mnist(root, split, size, channels) for split in ("train", "t10k"))
    return Data(
        train,
        test,
        classes=10,
        shape=train.shape,
        mean=(0.1307,) * channels,
        std=(0.3081,) * channels,
        class_names=tuple("0123456789"),
    )


def _read_mnist(root: str, split: str, size: int | None, channels: int) -> ImageSamples:
    hint = f"put the four files of MNIST, compressed or not, into {Path(root) / _MNIST_FOLDER}"
    images_path = find_file(root, _MNIST_FOLDER, f"{split}-images-idx3-ubyte", hint)
    labels_path = find_file(root, _MNIST_FOLDER, f"{split}-labels-idx1-ubyte", hint)
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: {len(labels)} labels for {len(images)} images in {images_path.name}")
    if labels.numel() and int(labels.max()) > 9:
        raise DataError(f"{labels_path}: has the label {int(labels.max())}, but there are 10 classes")
    return ImageSamples(images.unsqueeze(1), labels, size=size, channels=channels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of bytes with this many dimensions."""
    content = read_bytes(path, _MAX_IDX_BYTES)
    header = 4 + 4 * dimensions
    if len(content) < header or tuple(content[:4]) != (0, 0, _IDX_BYTES, dimensions):
        raise DataError(f"{path}: not an idx file of bytes in {dimensions} dimensions")
    lengths = [int.from_bytes(content[start : start + 4], "big") for start in range(4, header, 4)]
    if len(content) - header != prod(lengths):
        raise DataError(
            f"{path}: {len(content) - header} bytes of data instead of {prod(lengths)}: damaged or truncated"
        )
    if not prod(lengths):
        raise DataError(f"{path}: has no data")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(lengths)


def build_digits(size: int | None = 32) -> Data:
    """Return the digits: grey images of 3 channels, scaled from 8x8 to `size`."""
    check_size(size)
    tensors = load_file(_DIGITS_FILE)
    images, labels = tensors["images"].unsqueeze(1), tensors["labels"]
    # For each digit, how many of its class come before it. Not random: the split is the same everywhere.
    before = torch.nn.functional.one_hot(labels.long()).cumsum(0) - 1
    rank = before.gather(1, labels.long().unsqueeze(1)).squeeze(1)
    held_out = rank % _HELD_OUT == 0
    train = ImageSamples(images[~held_out], labels[~held_out], white=_DIGITS_WHITE, size=size)
    test = ImageSamples(images[held_out], labels[held_out], white=_DIGITS_WHITE, size=size)
    return Data(
        train,
        test,
        classes=10,
        shape=train.shape,
        mean=(0.305,) * 3,
        std=(0.324,) * 3,
        class_names=tuple("0123456789"),
    )
