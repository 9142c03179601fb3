"""The Dice loss of segmentation: one minus the overlap of the class probabilities with the mask.

The overlap is computed for each sample by itself and then averaged. Summed over a batch first, as some do, it
would be another number for every way of dividing a mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor
from torch.nn.functional import one_hot

from gpipe_cli.losses.measures import segmentation_accuracy
from gpipe_cli.losses.shapes import are_pixel_scores, check_fit


@final
class Dice:
    """Of scores [samples, classes, ...] and a class for each pixel [samples, ...].

    The classes that are in a mask count alike. One that is not there has nothing to overlap with; seen
    nevertheless, it takes its pixels from those that are.
    """

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = are_pixel_scores(output, target) and target.ndim > 1
        takes = "scores [samples, classes, ...] and a class for each pixel [samples, ...]"
        check_fit("dice", takes, output, target, fits=fits)
        seen = output.softmax(1).flatten(2)
        mask = one_hot(target.flatten(1), output.shape[1]).transpose(1, 2)
        area = mask.sum(2)
        # An absent class may have no area at all on either side: what it gives is left out, but must be a number.
        overlap = 2 * (seen * mask).sum(2) / (seen.sum(2) + area.clamp(min=1))
        present = area > 0
        missed: Tensor = 1 - (overlap * present).sum(1) / present.sum(1)
        return missed.mean()

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return segmentation_accuracy(output, target)
