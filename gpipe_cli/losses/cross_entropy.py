"""Cross entropy of class scores, with one class per sample or per pixel; the class -100 is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.losses.measures import (
    accuracy,
    are_pixel_scores,
    check_shapes,
    scored_labels,
    scores_of,
    segmentation_accuracy,
)
from gpipe_cli.values import check_fraction


@final
@dataclass(frozen=True)
class CrossEntropy:
    """Scores are [samples, classes, ...]; targets are classes [samples, ...], or probabilities shaped like scores."""

    predicts_numbers: ClassVar = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("loss.label_smoothing", self.label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        output = scores_of(output)
        probabilities = isinstance(output, Tensor) and output.shape == target.shape
        fits = (probabilities and target.is_floating_point()) or are_pixel_scores(output, target)
        expected = "scores [samples, classes, ...] and a class for each position [samples, ...]"
        check_shapes("cross_entropy", expected, output, target, fits=fits)
        return cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def row_weights(self, target: Tensor) -> Tensor:
        if target.is_floating_point():  # probabilities, of which none is ignored
            return torch.ones(len(target), dtype=torch.int64)
        return scored_labels(target)

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        scores = scores_of(output)
        if target.ndim == 1 or target.is_floating_point():
            return accuracy(scores, target)
        return segmentation_accuracy(scores, target, self.row_weights(target))
