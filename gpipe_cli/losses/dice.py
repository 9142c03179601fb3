"""The Dice loss of segmentation: one minus the overlap of the class probabilities with the mask.

The overlap is computed per sample and then averaged. Summed over a batch first, as in some implementations, it would
depend on how the mini-batch is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from gpipe_cli.losses.measures import are_pixel_scores, check_shapes, pixel_masks, segmentation_accuracy
from gpipe_cli.values import IGNORED_LABEL


@final
class Dice:
    """Scores are [samples, classes, ...], targets a class for each pixel [samples, ...].

    Pixels with the label -100 are ignored. All classes in a mask have the same weight. A class that is not in the mask
    has no overlap of its own, but its probability is missing from the classes that are.
    """

    predicts_numbers = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = are_pixel_scores(output, target) and target.ndim > 1
        expected = "scores [samples, classes, ...] and a class for each pixel [samples, ...]"
        check_shapes("dice", expected, output, target, fits=fits)
        scored = target != IGNORED_LABEL
        probabilities = output.softmax(1).flatten(2) * scored.flatten(1).unsqueeze(1)
        mask = pixel_masks(target, scored, output.shape[1]).transpose(1, 2)
        area = mask.sum(2)
        # The result for an absent class is dropped below, but must not be 0 / 0: its gradient would be nan.
        overlap = 2 * (probabilities * mask).sum(2) / (probabilities.sum(2) + area.clamp(min=1))
        present = area > 0
        loss: Tensor = 1 - (overlap * present).sum(1) / present.sum(1).clamp(min=1)
        return loss.mean()

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return segmentation_accuracy(output, target)
