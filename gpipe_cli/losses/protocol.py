"""What a loss is to the rest of gpipe, and what is counted beside one that counts nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from gpipe_cli.losses.measures import accuracy

Measure = Callable[[Any, Tensor], Mapping[str, float]]


@runtime_checkable
class MeasuringLoss(Protocol):
    def __call__(self, output: Any, target: Tensor, /) -> Tensor:
        """The mean over the samples."""

    def measure(self, output: Any, target: Tensor, /) -> Mapping[str, float]:
        """Sums over the samples, by the name each mean is reported under."""


def measure_of(loss: object) -> Measure:
    """The loss's own; beside a loss of torch or of yours that has none, classes where there are any."""
    return loss.measure if isinstance(loss, MeasuringLoss) else accuracy
