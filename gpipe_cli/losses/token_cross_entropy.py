"""Cross entropy of the next token, for language models.

All samples have the same number of tokens, so the mean over tokens is also the mean over samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.losses.measures import check_shapes, token_accuracy
from gpipe_cli.values import check_fraction


@final
@dataclass(frozen=True)
class TokenCrossEntropy:
    """Scores are [samples, tokens, vocabulary], as language models return them."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("loss.label_smoothing", self.label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == target.shape
        expected = "scores [samples, tokens, vocabulary] and a token for each position [samples, tokens]"
        check_shapes("token_cross_entropy", expected, output, target, fits=fits)
        return cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=self.label_smoothing)

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return token_accuracy(output, target)
