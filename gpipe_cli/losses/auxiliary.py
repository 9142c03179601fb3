"""Cross entropy of a model that has auxiliary heads: its main output's, and a share of each head's.

The main output is the first of a tuple or dict, and it alone is measured. A model may give it alone, as GoogLeNet
does in evaluation; then this is plain cross entropy. How much a head counts is the config's word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.cross_entropy import CrossEntropy


@final
@dataclass(frozen=True)
class AuxiliaryCrossEntropy:
    weight: float = 0.4
    """What each auxiliary head counts, the main output counting 1."""
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ConfigError(f"loss.weight={self.weight}: must be a finite number of at least 0")
        CrossEntropy(self.label_smoothing)  # checks it

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        cross_entropy = CrossEntropy(self.label_smoothing)
        main, *auxiliary = (cross_entropy(head, target) for head in _heads(output))
        return sum((self.weight * loss for loss in auxiliary), start=main)

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        return CrossEntropy(self.label_smoothing).measure(_heads(output)[0], target)


def _heads(output: Any) -> tuple[Any, ...]:
    """Main output first."""
    if isinstance(output, dict):
        return tuple(output.values())
    return output if isinstance(output, tuple) else (output,)
