"""The mean squared error, for regressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor
from torch.nn.functional import mse_loss

from gpipe_cli.losses.measures import absolute_error
from gpipe_cli.losses.shapes import check_fit


@final
class MeanSquaredError:
    """Of numbers in any shape, as many as there are targets: torch would stretch [8, 1] over [8] to 64."""

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        fits = isinstance(output, Tensor) and output.shape == target.shape
        check_fit("mse", "numbers and targets of one shape", output, target, fits=fits)
        return mse_loss(output, target.to(output.dtype))

    def measure(self, output: Tensor, target: Tensor) -> Mapping[str, float]:
        return absolute_error(output, target)
