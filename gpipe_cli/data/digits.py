"""The 1,797 handwritten digits of the UCI repository that come with the package (see files/digits.txt).

Decides how they are split and shown. Small and real, so that a first run needs nothing from anywhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from gpipe_cli.data.datasets import Data, ImageSamples
from gpipe_cli.data.keys import check_common_keys

_FILE = Path(__file__).parent / "files" / "digits.safetensors"
_WHITE = 16  # each pixel counts the ink in a block of 4x4
_HELD_OUT = 5  # every fifth of each class


def build(size: int | None = 32, workers: int = 0, timeout: float | None = None) -> Data:
    """Digits as grey images of 3 channels, `size` pixels wide; they were taken at 8."""
    check_common_keys(size, workers, timeout)
    tensors = load_file(_FILE)
    images, labels = tensors["images"].unsqueeze(1), tensors["labels"]
    held_out = _rank_within_class(labels) % _HELD_OUT == 0
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
    )


def _rank_within_class(labels: Tensor) -> Tensor:
    """For each label, how many of the same came before it. No chance: the split is the same everywhere."""
    before = torch.nn.functional.one_hot(labels.long()).cumsum(0) - 1
    return before.gather(1, labels.long().unsqueeze(1)).squeeze(1)
