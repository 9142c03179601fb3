"""An exception as one line: what went wrong, and the notes that say where. Knows nothing of where the line goes."""

from __future__ import annotations

import errno

from gpipe_cli.errors import INTERRUPTED, GpipeError, ResourceError
from gpipe_cli.report.text import plain

RESOURCES = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)
"""Of the system's errors those about memory, disk and permissions, wherever they come from."""


def describe(error: BaseException) -> str:
    """The text of an error of ours, which says all there is to say; type and text of any other."""
    text = plain(str(error))
    if not isinstance(error, GpipeError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = "".join(f" ({plain(note)})" for note in getattr(error, "__notes__", ()))
    return f"{text}{notes}"


def exit_code(error: BaseException) -> int:
    """What the process ends with. A SystemExit has no say in it: a layer's exit(0) is no success."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in RESOURCES:
        return ResourceError.exit_code
    return error.exit_code if isinstance(error, GpipeError) else 1
