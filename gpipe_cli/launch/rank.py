"""This process as one of several ranks: whether it is one, whether it prints, how it runs its task and tells its end.

gpipe starts ranks itself (`launcher`), or torchrun does, with the same environment variables. After the end of all
processes, torchrun shows what the first one that failed wrote to its error file, so users see one line however many
ranks fail alike. torch itself is not imported, so that a mistyped key is reported without it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from gpipe_cli.errors import PeerError, exit_code
from gpipe_cli.launch.rank_files import ExitReport, RankFiles, RankTask
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import redirect_streams, secure_streams
from gpipe_cli.safe_files import redacted
from gpipe_cli.training.signals import as_stopped

EXIT_CODE_FILE = "GPIPE_EXIT_CODE_FILE"
"""The environment variable with which a launch script names a file: torchrun exits with 1 whatever the error was."""
_STARTED, _REASON = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_LATER = 60
"""Seconds. torchrun reports the process that failed first, by timestamps in whole seconds."""


def is_rank() -> bool:
    return _STARTED in os.environ


def is_main_process() -> bool:
    """Whether this process prints and writes: rank 0, or the only process."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def leave_reason(line: str, *, of_another: bool) -> None:
    """Write the reason to torchrun's error file; of_another: this process failed only because another did."""
    path = os.environ.get(_REASON)
    if not is_rank() or not path:
        return
    when = int(time.time()) + (_LATER if of_another else 0)
    shown = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(when)}}
    Path(path).write_text(json.dumps({"message": shown}), encoding="utf-8")


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


def exit_report(error: BaseException) -> ExitReport:
    """The report of a rank that ends with this error now."""
    message = "" if isinstance(error, KeyboardInterrupt) else redacted(describe(error))
    return ExitReport(exit_code(error), message, isinstance(error, PeerError), time.monotonic())


def run_rank(folder: str, run_task: Callable[[RankFiles, RankTask], Mapping[str, Any]]) -> NoReturn:
    """Run the task of the launcher's folder in this process, report how that went, and exit.

    Rank 0 shares the launcher's streams; the streams of the others go to their logs.
    """
    files, rank = RankFiles(Path(folder)), int(os.environ["RANK"])
    task = files.read_task()
    secure_streams()
    faulthandler.enable()
    if rank:
        redirect_streams(files.output(rank), files.folder)
    try:
        report = ExitReport(0, summary=dict(run_task(files, task)), time=time.monotonic())
    except BaseException as error:  # noqa: BLE001 - a layer may raise anything; the launcher reports it
        # Before the traceback is formatted: the launcher names the rank whose error came first.
        report = exit_report(error)
        if rank and not report.is_clean:  # its stderr is a log
            sys.stderr.write(redacted("".join(traceback.format_exception(error))))
    # Before the process ends: the launcher reads it as soon as the kernel reports the death.
    files.write_exit_report(rank, report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the interpreter would wait for threads that wait for a dead peer.
    os._exit(0 if report.is_clean else report.exit_code)
