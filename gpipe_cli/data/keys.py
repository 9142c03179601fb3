"""Checks of what the configuration says about data: a wrong value is named with its key."""

from __future__ import annotations

from gpipe_cli.errors import ConfigError


def check_whole_number(key: str, value: object, *, least: int) -> None:
    # bool is an int to Python, but `data.workers=true` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key}={value}: must be a whole number of at least {least}")


def check_common_keys(size: int | None, workers: int) -> None:
    """The two keys every dataset has."""
    if size is not None:
        check_whole_number("data.size", size, least=1)
    check_whole_number("data.workers", workers, least=0)
