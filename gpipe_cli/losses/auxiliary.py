"""Cross entropy for a model with auxiliary heads: that of its main output plus a share of that of each head.

The main output is the first of a tuple or dict, and metrics are those of the main output. If a model returns only the
main output, as GoogLeNet does in evaluation, this is plain cross entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.cross_entropy import CrossEntropy


@final
@dataclass(frozen=True)
class AuxiliaryCrossEntropy:
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
