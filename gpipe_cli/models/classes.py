"""How many classes a model may tell apart."""

from __future__ import annotations

from gpipe_cli.errors import ConfigError


def check_num_classes(num_classes: int) -> None:
    if not isinstance(num_classes, int) or num_classes < 1:
        raise ConfigError(f"model.num_classes={num_classes}: must be a whole number of at least 1")
