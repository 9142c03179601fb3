"""What a dataset is to gpipe, and what the dataset files share: seeds, images in memory, and a part of the training
samples that is held out.

A dataset builder returns one `Data`: training samples, held-out samples, and what a model or transform must know.
"""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpipe_cli.data.tokenizer import Tokenizer
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput
from gpipe_cli.safe_files import open_regular
from gpipe_cli.values import check_whole_number

DEFAULT_FRACTION = 0.1
"""The share of the training samples to evaluate on if the data has no others for that."""


class Samples(Protocol):
    """Samples by index: an input, and a target that is a number or a tensor."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[ModelInput, Tensor | int]: ...


@runtime_checkable
class BatchedSamples(Protocol):
    """Samples that can return many at once, which is much faster than one by one for data in memory.

    `batch` may pad samples of different lengths, to the longest of them for example.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[ModelInput, Tensor | int]: ...
    def batch(self, indices: Tensor, /) -> tuple[ModelInput, Tensor]: ...


@final
@dataclass(frozen=True)
class Data:
    train: Samples
    test: Samples | None
    """None: gpipe holds out a part of the training samples, see data.validation."""
    classes: int
    shape: tuple[int, ...]
    """The shape of one input, or of its first tensor if it has several."""
    mean: tuple[float, ...] | None = None
    """Per channel, over the training inputs; None if unknown."""
    std: tuple[float, ...] | None = None
    flips: bool = False
    """Whether a mirrored input keeps its class: a cat does, a digit does not."""
    workers: int = 0
    """Processes that load samples; with 0 the training process loads them itself."""
    timeout: float | None = None
    """Seconds that a worker may take for a mini-batch."""
    tokenizer: Tokenizer | None = None
    """What made the inputs of text; None if they are something else."""
    has_chats: bool = False
    """Whether the text is chats, of which only the answers are learned."""
    longest: int = 0
    """Index of the longest training sample, where lengths differ: the model is traced, and its memory estimated, with a
    batch padded to it."""
    notes: tuple[str, ...] = ()
    """What a user should know about how samples were made, a line each."""
    class_names: tuple[str, ...] | None = None
    """In the order of the labels; None if the classes have no names, or if targets are no classes."""

    def __post_init__(self) -> None:
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise DataError(f"data: has {len(self.class_names)} class names for {self.classes} classes")


def check_size(size: int | None) -> None:
    if size is not None:
        check_whole_number("data.size", size, least=1)


def derived_seed(*parts: int | str) -> int:
    """Return a seed below 2**63 for a purpose such as (seed, "order", epoch), so that no seed has to be saved.

    It is the same in every process, run and version, which Python's own hash() is not.
    """
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(*parts))


@final
class ImageSamples:
    """Images in memory as uint8, returned as floats from 0 to 1.

    images: uint8 [length, channels, height, width].
    white: the value that becomes 1.
    size: the side to scale images to; None keeps theirs.
    channels: how often to repeat a single channel.
    """

    def __init__(
        self, images: Tensor, targets: Tensor, *, white: int = 255, size: int | None = None, channels: int = 3
    ) -> None:
        assert len(images) == len(targets) and images.dtype == torch.uint8 and images.dim() == 4
        self._images, self.targets = images, targets.long()
        self._white, self._size, self._channels = white, size, channels

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width = self._images.shape[2:]
        return self._channels, self._size or height, self._size or width

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._images.index_select(0, indices).float().div_(self._white)
        if self._size is not None:
            inputs = resize(inputs, self._size, self._size)
        return inputs.expand(-1, self._channels, -1, -1).contiguous(), self.targets.index_select(0, indices)


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Scale images [length, channels, height, width] with antialiasing."""
    if images.shape[-2:] == (height, width):
        return images
    return interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def find_file(root: str | Path, folder: str, name: str, hint: str) -> Path:
    """Return the path of the file or of its .gz version; `hint` ends the error message if both are missing."""
    path = Path(root) / folder / name
    for candidate in (path, path.with_name(name + ".gz")):
        if os.path.exists(candidate):  # noqa: PTH110 - unlike Path.exists, False without permission
            return candidate
    raise DataError(f"data.root={root}: {path} is missing; {hint}")


def read_bytes(path: Path, limit: int) -> bytearray:
    """Read at most `limit` bytes, so that a small compressed file cannot fill the memory."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return bytearray((gzip.open(file) if path.suffix == ".gz" else file).read(limit))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or unreadable ({error})") from error


@final
@dataclass(frozen=True)
class SplitData:
    data: Data
    validation: Samples | None
    """The part that is held out; None if there is none."""
    note: str | None


def hold_out(data: Data, fraction: float | None, seed: int, *, stratify: bool = True) -> SplitData:
    """Divide the training samples, if `fraction` says so or the data has no test set.

    The held-out part is the test set of data without one. Otherwise training evaluates on it, and leaves the test set
    to `gpipe eval`. Which samples it holds depends on the seed alone, so every rank, engine and resumed run holds out
    the same ones.

    stratify: hold out the same fraction of each class, where the samples say their classes.
    """
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"data.validation={fraction}: must be between 0 and 1, or null; 0.1 holds out a tenth of the samples"
        )
    if fraction is None and data.test is not None:
        return SplitData(data, None, None)
    fraction = DEFAULT_FRACTION if fraction is None else fraction
    length = len(data.train)
    if length < 2:
        raise DataError(f"data.validation={fraction}: a single sample cannot be divided; give at least 2")
    count = min(max(round(length * fraction), 1), length - 1)
    order = torch.randperm(length, generator=generator_for(seed, "validation"))
    # The longest sample stays: the model is traced, and its memory estimated, with it.
    order = order[order != data.longest]
    labels = class_labels(data.train) if stratify else None
    order = across_classes(order, labels)
    held_out, kept = order[:count].sort().values, torch.cat([order[count:], torch.tensor([data.longest])])
    kept = kept.sort().values
    validation = subset(data.train, held_out)
    note = (
        f"data.validation={fraction}: holding out {count} of {length} training samples, chosen by seed={seed}"
        f"{'' if labels is None else ' across all classes'}"
    )
    if data.tokenizer is not None and data.class_names is None:
        note += "; its windows of text may overlap with others, those that data.held_out holds out do not"
    divided = replace(
        data,
        train=subset(data.train, kept),
        test=validation if data.test is None else data.test,
        longest=int(torch.searchsorted(kept, data.longest)),
    )
    return SplitData(divided, validation, note)


def class_labels(samples: Samples) -> Tensor | None:
    """The class of each sample, if the samples have them as `targets`, as torchvision's datasets do."""
    try:
        labels = torch.as_tensor(getattr(samples, "targets", None))
    except (TypeError, ValueError, RuntimeError):
        return None
    is_integer = not (labels.is_floating_point() or labels.is_complex())
    return labels if is_integer and labels.shape == (len(samples),) else None


def across_classes(order: Tensor, labels: Tensor | None) -> Tensor:
    """Rearrange indices so that any number of them from the front is divided among the classes as all are."""
    if labels is None:
        return order
    by_class = order[labels[order].argsort(stable=True)]
    _, place, counts = torch.unique(labels[by_class], return_inverse=True, return_counts=True)
    rank = torch.arange(len(by_class)) - (counts.cumsum(0) - counts)[place]
    return by_class[((rank.double() + 0.5) / counts[place]).argsort(stable=True)]


def subset(samples: Samples, indices: Tensor) -> Samples:
    """The samples with these indices, which load batches at once if the samples do."""
    return (
        _BatchedSubset(samples, indices) if isinstance(samples, BatchedSamples) else _Subset(samples, indices)
    )


class _Subset:
    def __init__(self, samples: Samples, indices: Tensor) -> None:
        self._samples, self._indices = samples, indices

    @property
    def targets(self) -> Tensor | None:
        labels = class_labels(self._samples)
        return None if labels is None else labels[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor | int]:
        return self._samples[int(self._indices[index])]


@final
class _BatchedSubset(_Subset):
    def batch(self, indices: Tensor) -> tuple[ModelInput, Tensor]:
        assert isinstance(self._samples, BatchedSamples), "as `subset` chose"
        return self._samples.batch(self._indices[indices])
