"""Notes on errors: where in a pipe an error happened.

Decides that describing a failure can never replace it: whatever the description raises, the error goes on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["add_note"]

logger = logging.getLogger("gpipe_cli.pipeline")


def add_note(error: BaseException, describe: Callable[[], str]) -> None:
    """Add what `describe` gives to the notes of `error`, if it gives anything."""
    try:
        error.add_note(describe())
    except BaseException:
        logger.debug("an error could not be described", exc_info=True)
