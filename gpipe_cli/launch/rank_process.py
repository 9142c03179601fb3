"""One rank, as the launcher starts it: it runs its task, and reports at its end how that went.

Rank 0 shares the launcher's streams; the streams of the others go to their logs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gpipe_cli.errors import PeerError, Stopped, exit_code
from gpipe_cli.launch.rank_files import ExitReport, RankFiles, RankTask
from gpipe_cli.redaction import redacted
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import redirect_streams, secure_streams


def run_rank(folder: str, run_task: Callable[[RankFiles, RankTask], Mapping[str, Any]]) -> NoReturn:
    """Run the task of the launcher's folder in this process, and exit."""
    files, rank = RankFiles(Path(folder)), int(os.environ["RANK"])
    task = files.read_task()
    secure_streams()
    faulthandler.enable()
    if rank:
        redirect_streams(files.output(rank), files.folder)
    try:
        report = ExitReport(0, summary=dict(run_task(files, task)), time=time.monotonic())
    except (Stopped, KeyboardInterrupt) as error:
        message = redacted(describe(error)) if isinstance(error, Stopped) else ""
        report = ExitReport(exit_code(error), message, time=time.monotonic())
    except BaseException as error:  # noqa: BLE001 - a layer may raise anything; the launcher reports it
        # Before the traceback is formatted: the launcher names the rank whose error came first.
        failed_at = time.monotonic()
        if rank:  # its stderr is a log
            sys.stderr.write(redacted("".join(traceback.format_exception(error))))
        message, caused_by_peer = redacted(describe(error)), isinstance(error, PeerError)
        report = ExitReport(exit_code(error), message, caused_by_peer, failed_at)
    # Before the process ends: the launcher reads it as soon as the kernel reports the death.
    files.write_exit_report(rank, report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the interpreter would wait for threads that wait for a dead peer.
    os._exit(0 if report.is_clean else report.exit_code)
