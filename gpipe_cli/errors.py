"""Every exception that gpipe raises, with the exit code of the command line.

    GpipeError                    1  an error in a layer or in gpipe itself
    ├── ConfigError               2  a key, value or combination that cannot be used
    ├── DataError                 3  data that is missing, damaged or does not fit the model
    ├── RunError                  4  a run or snapshot that is missing or damaged
    ├── NumericError              5  a loss or gradient that is not finite
    ├── ResourceError             6  memory, disk or permissions
    ├── PeerError                 7  another process failed or did not answer
    │   ├── PeerRaised            7  it raised an error that a restart would repeat
    │   └── StepTimeout           7  a step took longer than step_timeout
    └── Stopped                  75  stopped on request; can be resumed
        └── Interrupted         130  the same, by Ctrl-C

`cli` prints an error as one line; Python users see a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

INTERRUPTED = 130
"""The exit code of Ctrl-C: of a KeyboardInterrupt, and of a run that saved its state and stopped."""
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


class GpipeError(Exception):
    """Base class. The message is one line that names the problem, the value and the hint."""

    exit_code = 1


class ConfigError(GpipeError):
    exit_code = 2


class DataError(GpipeError):
    exit_code = 3


class RunError(GpipeError):
    exit_code = 4


class NumericError(GpipeError):
    exit_code = 5


class ResourceError(GpipeError):
    exit_code = 6


class PeerError(GpipeError):
    exit_code = 7


class PeerRaised(PeerError):
    pass


class StepTimeout(PeerError):
    pass


class Stopped(GpipeError):
    exit_code = 75


class Interrupted(Stopped):
    exit_code = INTERRUPTED


def exit_code(error: BaseException) -> int:
    """The exit code for an error. The code of a SystemExit is ignored: a layer's exit(0) is not a success."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if is_long_name(error) or is_long_name(error.__cause__):
        return ConfigError.exit_code
    if isinstance(error, OSError) and error.errno in RESOURCE_ERRNOS:
        return ResourceError.exit_code
    return error.exit_code if isinstance(error, GpipeError) else 1


def is_long_name(error: BaseException | None) -> bool:
    """Whether the system refuses a path because a name in it is too long."""
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'chunks'?`, or an empty string if no name is close."""
    candidates = list(known)
    matches = get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not matches:  # the right name in the wrong place: lr -> optimizer.lr
        matches = [name for name in candidates if name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f"did you mean '{matches[0]}'?" if matches else ""


def or_list(word: str, known: Iterable[str]) -> str:
    """A suggestion if a name is close, otherwise all names."""
    candidates = sorted(known)
    return did_you_mean(word, candidates) or f"choose one of: {', '.join(candidates)}"
