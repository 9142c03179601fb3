"""Checks of what the configuration says about data: a wrong value is named with its key."""

from __future__ import annotations

import math

from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_whole_number


def check_common_keys(size: int | None, workers: int, timeout: float | None) -> None:
    """The keys every dataset has."""
    if size is not None:
        check_whole_number("data.size", size, least=1)
    check_whole_number("data.workers", workers, least=0)
    if timeout is None:
        return
    if not 0 < timeout < math.inf:  # not a number is neither
        raise ConfigError(f"data.timeout={timeout}: must be a positive number of seconds")
    if not workers:
        raise ConfigError(
            f"data.timeout={timeout}: waits for the workers of data.workers, of which there are none"
        )
