"""The Dice loss of segmentation: one minus the overlap of the class probabilities with the mask.

The overlap is computed for each sample by itself and then averaged. Summed over a batch first, as some do, it
would be another number for every way of dividing a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.nn.functional import one_hot

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import segmentation_accuracy
from gpipe_cli.losses.shapes import are_pixel_scores, check_fit


@final
@dataclass(frozen=True)
class Dice:
    """Of scores [samples, classes, ...] and a class for each pixel [samples, ...]; all classes count alike.

    smooth: pixels added above and below, so that a class that is absent from a sample, and from what was
    seen in it, counts as found.
    """

    smooth: float = 1.0

    def __post_init__(self) -> None:
        if not self.smooth > 0:
            raise ConfigError(f"loss.smooth={self.smooth}: must be greater than 0")

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = are_pixel_scores(output, target) and target.ndim > 1
        takes = "scores [samples, classes, ...] and a class for each pixel [samples, ...]"
        check_fit("dice", takes, output, target, fits=fits)
        seen = output.softmax(1).flatten(2)
        mask = one_hot(target.flatten(1), output.shape[1]).transpose(1, 2).to(seen.dtype)
        overlap: Tensor = (2 * (seen * mask).sum(2) + self.smooth) / (seen.sum(2) + mask.sum(2) + self.smooth)
        return 1 - overlap.mean()

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return segmentation_accuracy(output, target)
