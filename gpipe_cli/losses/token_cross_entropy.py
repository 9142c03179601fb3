"""Cross entropy of the next token, for language models.

The mean is over all tokens but those with the label -100, such as padding and the prompts of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.losses.measures import check_shapes, scored_labels, scores_of, token_accuracy
from gpipe_cli.values import check_fraction


@final
@dataclass(frozen=True)
class TokenCrossEntropy:
    """Scores are [samples, tokens, vocabulary], as language models return them."""

    predicts_numbers: ClassVar = False
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("loss.label_smoothing", self.label_smoothing)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        output = scores_of(output)
        fits = isinstance(output, Tensor) and output.ndim == 3 and output.shape[:2] == target.shape
        expected = "scores [samples, tokens, vocabulary] and a token for each position [samples, tokens]"
        check_shapes("token_cross_entropy", expected, output, target, fits=fits)
        return cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=self.label_smoothing)

    def row_weights(self, target: Tensor) -> Tensor:
        return scored_labels(target)

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        return token_accuracy(scores_of(output), target)
