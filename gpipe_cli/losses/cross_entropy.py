"""Cross entropy of class scores, with one class per sample or per pixel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.losses.measures import accuracy, are_pixel_scores, check_shapes, segmentation_accuracy
from gpipe_cli.values import check_fraction


@final
@dataclass(frozen=True)
class CrossEntropy:
    """Scores are [samples, classes, ...]; targets are classes [samples, ...], or probabilities shaped like scores."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("loss.label_smoothing", self.label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        probabilities = isinstance(output, Tensor) and output.shape == target.shape
        fits = (probabilities and target.is_floating_point()) or are_pixel_scores(output, target)
        expected = "scores [samples, classes, ...] and a class for each position [samples, ...]"
        check_shapes("cross_entropy", expected, output, target, fits=fits)
        return cross_entropy(output, target, label_smoothing=self.label_smoothing)

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        if target.ndim == 1 or target.is_floating_point():
            return accuracy(output, target)
        return segmentation_accuracy(output, target)
