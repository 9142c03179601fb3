"""One rank of a job, as its launcher starts it: it runs the command, and says at its end how that came about.

Rank 0 has the streams of the launcher; what the others would print goes to their logs.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.compose import settings_of
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines.memory import memory_watched
from gpipe_cli.errors import PeerError, Stopped
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.redaction import redacted
from gpipe_cli.report.failure import describe, exit_code
from gpipe_cli.report.output import redirect_streams, secure_streams
from gpipe_cli.run.job import Job, Rank

__all__ = ["main"]


def main(folder: str) -> NoReturn:
    """Never returns: Python's own end would wait for threads of a peer that has gone."""
    meeting, rank = RankFiles(Path(folder)), int(os.environ["RANK"])
    task = json.loads(meeting.task.read_text(encoding="utf-8"))
    die_with_parent(task["launcher"])
    secure_streams()
    faulthandler.enable()
    if rank:
        redirect_streams(meeting.output(rank), meeting.folder)
    word = _word(meeting, task)
    meeting.write_exit_report(rank, word)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if word.is_clean else word.exit_code)


def _word(meeting: RankFiles, task: dict[str, Any]) -> ExitReport:
    try:
        return ExitReport(0, summary=_run(meeting, task), time=time.monotonic())
    except (Stopped, KeyboardInterrupt) as error:
        text = redacted(describe(error)) if isinstance(error, Stopped) else ""
        return ExitReport(exit_code(error), text, time=time.monotonic())
    except BaseException as error:  # noqa: BLE001 - the last place: whatever a layer raised is passed on
        when = time.monotonic()
        if os.environ["RANK"] != "0":  # its streams are a log
            sys.stderr.write(redacted("".join(traceback.format_exception(error))))
        return ExitReport(exit_code(error), redacted(describe(error)), isinstance(error, PeerError), when)


def _run(meeting: RankFiles, task: dict[str, Any]) -> dict[str, Any]:
    tree = OmegaConf.create(task["tree"])
    assert isinstance(tree, DictConfig)
    overrides, command, run = tuple(task["overrides"]), task["command"], task["run"]
    job = Job(
        command,
        overrides,
        line=task["line"],
        tree=tree,
        model=task["model"],
        number=task["number"] if run is None else None,
        json=True,  # the launcher shows what was found
        dry_run=False,
        rank=Rank(meeting, task["balance"], task["began"]),
    )
    settings = settings_of(tree, command, overrides)
    if run is not None:  # after a failure all ranks go on from what was saved
        assert isinstance(settings, TrainConfig)
        settings = replace(settings, resume="auto", run_dir=run)
    with memory_watched():
        return dict(importlib.import_module(f"gpipe_cli.commands.{command}").run(settings, job))
