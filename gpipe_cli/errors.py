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

INTERRUPTED = (
    130  # exit code of Ctrl-C, whether as a KeyboardInterrupt or as a run that saved its state and stopped
)


class GpipeError(Exception):
    """Base class. The message is one line that names the problem, the value and the cure."""

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
