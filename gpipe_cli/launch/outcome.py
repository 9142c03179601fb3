"""How an attempt to run ends: `outcome.json` in the run directory, and the exit code for the script that started it.

Imports no torch: an attempt may end before it needs any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpipe_cli.errors import GpipeError, PeerError, Stopped, exit_code
from gpipe_cli.report.formatting import describe
from gpipe_cli.runs.directory import lock_run_directory, write_json
from gpipe_cli.runs.reader import OUTCOME, RESULTS
from gpipe_cli.safe_files import redacted
from gpipe_cli.training.signals import as_stopped

EXIT_CODE_FILE = "GPIPE_EXIT_CODE_FILE"
"""The environment variable with which a launch script names a file: torchrun exits with 1 whatever the error was."""


@contextmanager
def recorded_outcome(run: Path) -> Iterator[None]:
    """Inside is an attempt to run it: forget how the last one ended, and record which error ends this one, if any."""
    with suppress(OSError):
        (run / OUTCOME).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        write_outcome(run, error)
        raise


@contextmanager
def recorded_attempt(run: Path) -> Iterator[None]:
    """`recorded_outcome` for an attempt that has yet to open its run; another process may have it, or take it."""
    with suppress(GpipeError), lock_run_directory(run), recorded_outcome(run):
        pass
    try:
        yield
    except BaseException as error:
        with suppress(GpipeError), lock_run_directory(run):
            write_outcome(run, error)
        raise


def write_outcome(run: Path, error: BaseException) -> None:
    """Record which error ended a run, for `run_state`; a run that has finished stays finished."""
    if any((run / name).exists() for name in RESULTS):
        return
    error = as_stopped(error)
    state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
    with suppress(GpipeError):  # a full disk must not hide the error itself
        content = {"state": state, "exit_code": exit_code(error), "reason": redacted(describe(error))}
        write_json(run / OUTCOME, content)


def leave_exit_code(error: BaseException) -> None:
    """Write the exit code of an error to the file of the launch script; several ranks may call this.

    The first error counts, except that any error replaces the loss of a rank that another error ended.
    """
    path = os.environ.get(EXIT_CODE_FILE)
    if not path:
        return
    lost_peer, code = str(PeerError.exit_code), str(exit_code(as_stopped(error)))
    with suppress(OSError):  # the script then takes torchrun's exit code
        try:
            with Path(path).open("x") as file:
                file.write(code)
        except FileExistsError:
            if code != lost_peer and Path(path).read_text() == lost_peer:
                Path(path).write_text(code)
