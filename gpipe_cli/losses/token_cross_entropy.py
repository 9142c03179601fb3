"""Cross entropy of the next token, for language models.

A mean over all tokens; as every sample has as many, that is the mean over samples which a step relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.losses.measures import token_accuracy
from gpipe_cli.losses.shapes import check_fit
from gpipe_cli.values import check_share


@final
@dataclass(frozen=True)
class TokenCrossEntropy:
    """Of scores [samples, tokens, vocabulary]; the vocabulary comes last, as a language model gives it."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_share("loss.label_smoothing", self.label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == target.shape
        takes = "scores [samples, tokens, vocabulary] and a token for each place [samples, tokens]"
        check_fit("token_cross_entropy", takes, output, target, fits=fits)
        return cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=self.label_smoothing)

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return token_accuracy(output, target)
