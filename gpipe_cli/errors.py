"""Every exception of gpipe, each with the exit code the command line ends with.

    GpipeError                    1  an error of a layer or of gpipe itself
    ├── ConfigError               2  a key, value or combination that cannot be used
    ├── DataError                 3  data missing, broken or not fitting the model
    ├── RunError                  4  a run or snapshot missing or damaged
    ├── NumericError              5  a loss or gradient that is not finite
    ├── ResourceError             6  memory, disk or permissions
    ├── PeerError                 7  another process failed or did not answer
    │   ├── PeerRaised            7  it raised, as it would again
    │   └── StepTimeout           7  a step took longer than step_timeout
    └── Stopped                  75  stopped on request; can be resumed
        └── Interrupted         130  the same, by Ctrl-C

The file knows nothing of how an error is shown: `cli` prints one line, Python users see a traceback.
"""

from __future__ import annotations

INTERRUPTED = 130  # exit code of Ctrl-C, as a KeyboardInterrupt or as a run that stopped in good order


class GpipeError(Exception):
    """Base of all: its text is one line that names what is wrong, the value, and the cure."""

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
