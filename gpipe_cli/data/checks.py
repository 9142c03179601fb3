"""Whether a batch can be trained on; told before torch fails on it or, worse, does not."""

from __future__ import annotations

from torch import Tensor

from gpipe_cli.errors import DataError


def check_batch(input: Tensor, target: Tensor) -> None:
    if len(input) != len(target):
        raise DataError(f"a batch of {len(input)} inputs came with {len(target)} targets")


def check_labels(target: Tensor, classes: int) -> None:
    """Labels of classes 0 to classes - 1; cross_entropy reads foreign memory on some devices otherwise."""
    if not target.numel():
        return
    low, high = (int(bound) for bound in target.aminmax())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"label {wrong} is out of range: the model has {classes} classes, 0 to {classes - 1}")
