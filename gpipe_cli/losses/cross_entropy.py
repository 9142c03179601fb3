"""Cross entropy: of classes per sample or pixel, of the next token, and for a model with auxiliary heads.

Positions with the label -100, such as padding and the prompts of a chat, are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.blocks import AUTO, blocked_cross_entropy, blocks_of, check_block, factors_of
from gpipe_cli.losses.measures import (
    accuracy,
    are_pixel_scores,
    check_shapes,
    scored_labels,
    scores_of,
    segmentation_accuracy,
    token_accuracy,
)
from gpipe_cli.values import AUXILIARY_LOSS, check_fraction


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


@final
@dataclass(frozen=True)
class TokenCrossEntropy:
    """Scores are [samples, tokens, vocabulary], as of a language model, or [samples, classes], as of a classifier.

    The auxiliary loss of each sample that a model returns beside its scores is added.
    """

    predicts_numbers: ClassVar = False
    label_smoothing: float = 0.0
    block: int | str = AUTO
    """Of how many tokens the scores are computed at once, if the model ends in a linear layer."""

    def __post_init__(self) -> None:
        check_fraction("loss.label_smoothing", self.label_smoothing)
        check_block(self.block)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        if isinstance(output, Mapping) and AUXILIARY_LOSS in output:
            auxiliary: Tensor = output[AUXILIARY_LOSS]
            return self(output["logits"], target) + auxiliary.mean()
        output = scores_of(output)
        fits = isinstance(output, Tensor) and output.ndim in (2, 3) and output.shape[:-1] == target.shape
        expected = (
            "scores [samples, tokens, vocabulary] and a token for each position [samples, tokens], or scores [samples, "
            "classes] and a class for each sample"
        )
        check_shapes("token_cross_entropy", expected, output, target, fits=fits)
        tokens, wanted, factors = output.flatten(0, -2), target.flatten(), factors_of(output)
        if factors is not None:
            return blocked_cross_entropy(tokens, wanted, factors, self.label_smoothing)
        return cross_entropy(tokens, wanted, label_smoothing=self.label_smoothing)

    def row_weights(self, target: Tensor) -> Tensor:
        return scored_labels(target)

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        scores = scores_of(output)
        factors = factors_of(scores)
        if target.ndim == 1:
            return accuracy(scores, target)
        if factors is None:
            return token_accuracy(scores, target)
        sums = Counter[str]()
        for block in blocks_of(scores, target, factors):
            sums.update(token_accuracy(*block))
        return sums


@final
@dataclass(frozen=True)
class AuxiliaryCrossEntropy:
    """The cross entropy of a model's main output plus a share of that of each auxiliary head.

    The main output is the first of a tuple or dict, and metrics are those of the main output. If a model returns only
    the main output, as GoogLeNet does in evaluation, this is plain cross entropy.
    """

    predicts_numbers: ClassVar = False
    weight: float = 0.4
    """The weight of each auxiliary head; the main output has weight 1."""
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ConfigError(f"loss.weight={self.weight}: must be a finite number of at least 0")
        CrossEntropy(self.label_smoothing)  # checks the value

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        cross_entropy = CrossEntropy(self.label_smoothing)
        main, *auxiliary = (cross_entropy(head, target) for head in _heads(output))
        return sum((self.weight * loss for loss in auxiliary), start=main)

    def row_weights(self, target: Tensor) -> Tensor:
        return CrossEntropy(self.label_smoothing).row_weights(target)

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        return CrossEntropy(self.label_smoothing).measure(_heads(output)[0], target)


def _heads(output: Any) -> tuple[Any, ...]:
    """Return all outputs, the main one first."""
    if isinstance(output, dict):
        return tuple(output.values())
    return output if isinstance(output, tuple) else (output,)
