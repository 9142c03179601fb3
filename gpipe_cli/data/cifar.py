"""CIFAR-10 and CIFAR-100 from their published binary version; gpipe does not read the pickled Python version.

https://www.cs.toronto.edu/~kriz/cifar.html: files of equal records, each a label or two and an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples, check_common_keys, find_file, read_bytes
from gpipe_cli.errors import ConfigError, DataError

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
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
class _Variant:
    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    """Bytes before the image; the last of them is the class."""
    classes: tuple[str, ...]
    """Their names, in the order of the labels."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_VARIANTS = {
    "cifar10": _Variant(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        labels=1,
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Variant(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        labels=2,
        classes=tuple(_CIFAR100.split()),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}
_RECORDS = {"train.bin": 50_000}  # per file; every other file has 10,000


def build(
    name: str, root: str = "data", size: int | None = None, workers: int = 0, timeout: float | None = None
) -> Data:
    """Read images of 3x32x32, or scaled to `size`, from the unpacked archive under `root`."""
    check_common_keys(size, workers, timeout)
    if name not in _VARIANTS:
        raise ConfigError(f"data.name={name}: choose one of {', '.join(_VARIANTS)}")
    variant = _VARIANTS[name]
    train, test = (_read(variant, root, files, size) for files in (variant.train, variant.test))
    return Data(
        train,
        test,
        classes=len(variant.classes),
        shape=train.shape,
        mean=variant.mean,
        std=variant.std,
        flips=True,
        workers=workers,
        timeout=timeout,
        class_names=variant.classes,
    )


def _read(variant: _Variant, root: str, names: tuple[str, ...], size: int | None) -> ImageSamples:
    cure = f"unpack {variant.archive} from https://www.cs.toronto.edu/~kriz/cifar.html into {root}"
    if pickled := sorted(Path(root).glob(variant.archive.replace("binary.tar.gz", "*py*"))):
        cure = f"{pickled[0]} is pickled and can run code, so gpipe does not read it; {cure}"
    paths = [find_file(root, variant.folder, name, cure) for name in names]
    records = torch.cat([_records(path, variant) for path in paths])
    images = records[:, variant.labels :].reshape(-1, *_SHAPE)
    return ImageSamples(images, records[:, variant.labels - 1], size=size)


def _records(path: Path, variant: _Variant) -> Tensor:
    length = variant.labels + _PIXELS
    expected = _RECORDS.get(path.name.removesuffix(".gz"), 10_000) * length
    content = read_bytes(path, expected + 1)
    if len(content) != expected:
        size = f"{len(content)} bytes" if len(content) < expected else f"more than {expected} bytes"
        raise DataError(f"{path}: has {size} instead of {expected}: not the published file")
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, length)
    label = int(records[:, variant.labels - 1].max())
    if label >= len(variant.classes):
        raise DataError(f"{path}: has the label {label}, but there are {len(variant.classes)} classes")
    return records
