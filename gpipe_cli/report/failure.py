"""An exception as one line of text, and as the exit code of the process."""

from __future__ import annotations

import errno

from gpipe_cli.errors import INTERRUPTED, GpipeError, ResourceError
from gpipe_cli.report.formatting import one_line

RESOURCE_ERRNOS = frozenset(
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
"""System errors about memory, disks and permissions."""


def describe(error: BaseException) -> str:
    """The message of a GpipeError, or type and message of any other exception, followed by its notes."""
    text = one_line(str(error))
    if not isinstance(error, GpipeError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    notes = "".join(f" ({one_line(note)})" for note in getattr(error, "__notes__", ()))
    return f"{text}{notes}"


def exit_code(error: BaseException) -> int:
    """The exit code for an error. The code of a SystemExit is ignored: a layer's exit(0) is not a success."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno in RESOURCE_ERRNOS:
        return ResourceError.exit_code
    return error.exit_code if isinstance(error, GpipeError) else 1
