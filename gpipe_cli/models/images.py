"""Whether the samples a model is to be built for are images."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.errors import ConfigError


def check_images(model: str, shape: Sequence[int]) -> None:
    """Raise unless a sample is [channels, height, width]. model: what to call it."""
    if len(shape) != 3:
        raise ConfigError(f"model: {model} takes images, and the data has the shape {list(shape)}")
