"""Whether an output and its target fit a loss; told in its own words before torch fails, or worse, broadcasts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpipe_cli.errors import DataError


def check_fit(loss: str, takes: str, output: Any, target: Tensor, *, fits: bool) -> None:
    """Raise unless they fit. takes: the shapes that would."""
    if not fits:
        raise DataError(
            f"loss={loss}: takes {takes}, got {described(output)} and targets {described(target)}; "
            "choose a loss that fits, see `gpipe ls losses`"
        )


def are_pixel_scores(output: Any, target: Tensor) -> bool:
    """[samples, classes, ...] beside one class for each place, [samples, ...]."""
    return (
        isinstance(output, Tensor)
        and output.ndim == target.ndim + 1
        and output.shape[:1] + output.shape[2:] == target.shape
        and not target.is_floating_point()
    )


def described(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
