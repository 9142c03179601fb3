"""Checks of the numbers a component is given: a wrong one is named with its key."""

from __future__ import annotations

from gpipe_cli.errors import ConfigError


def check_whole_number(key: str, value: object, *, least: int) -> None:
    # bool is an int to Python, but `data.workers=true` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={value}: must be a whole number of at least {least}")


def check_share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}={value}: must be from 0 to 1")
