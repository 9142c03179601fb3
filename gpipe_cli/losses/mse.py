"""Mean squared error, for regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor
from torch.nn.functional import mse_loss

from gpipe_cli.losses.measures import absolute_error, check_shapes, scores_of


@final
class MeanSquaredError:
    """Output and target must have the same shape: torch would broadcast [8, 1] and [8] to 64 numbers."""

    predicts_numbers = True

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        output = scores_of(output)
        fits = isinstance(output, Tensor) and output.shape == target.shape
        check_shapes("mse", "numbers and targets of the same shape", output, target, fits=fits)
        return mse_loss(output, target.to(output.dtype))

    def measure(self, output: Any, target: Tensor) -> Mapping[str, float]:
        return absolute_error(scores_of(output), target)
