"""Checks of what the configuration says about data: a wrong value is named with its key."""

from __future__ import annotations

from gpipe_cli.values import check_whole_number


def check_common_keys(size: int | None, workers: int) -> None:
    """The two keys every dataset has."""
    if size is not None:
        check_whole_number("data.size", size, least=1)
    check_whole_number("data.workers", workers, least=0)
