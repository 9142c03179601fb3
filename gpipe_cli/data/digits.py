"""The 1,797 handwritten digits of the UCI repository, which come with the package (see files/digits.txt).

They are small and real, so that a first run needs no download.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gpipe_cli.data.datasets import Data, ImageSamples, check_common_keys

_FILE = Path(__file__).parent / "files" / "digits.safetensors"
_WHITE = 16  # each pixel counts the dark pixels in a block of 4x4
_HELD_OUT = 5  # every fifth digit of each class


def build(size: int | None = 32, workers: int = 0, timeout: float | None = None) -> Data:
    """Return grey images of 3 channels, scaled from 8x8 to `size`."""
    check_common_keys(size, workers, timeout)
    tensors = load_file(_FILE)
    images, labels = tensors["images"].unsqueeze(1), tensors["labels"]
    # For each digit, how many of its class come before it. Not random: the split is the same everywhere.
    before = torch.nn.functional.one_hot(labels.long()).cumsum(0) - 1
    rank = before.gather(1, labels.long().unsqueeze(1)).squeeze(1)
    held_out = rank % _HELD_OUT == 0
    train = ImageSamples(images[~held_out], labels[~held_out], white=_WHITE, size=size)
    test = ImageSamples(images[held_out], labels[held_out], white=_WHITE, size=size)
    return Data(
        train,
        test,
        classes=10,
        shape=train.shape,
        mean=(0.305,) * 3,
        std=(0.324,) * 3,
        workers=workers,
        timeout=timeout,
        class_names=tuple("0123456789"),
    )
