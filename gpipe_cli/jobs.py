"""Run one job in this process: import its command, and with it torch, and hand it the settings."""

from __future__ import annotations

import gc
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.activity import activity
from gpipe_cli.config.compose import job_of_rank
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.launch.rank import is_main_process, run_rank
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.report.output import print_status
from gpipe_cli.training.signals import stop_immediately

WITHOUT_TORCH = ("launch-script", "report", "runs", "cp")
"""They read and write files, and do so at once: importing torch takes seconds."""


def run_job(job: Job) -> Summary:
    # Commands import torch. Composing, printing and rejecting a configuration must not wait for that.
    with import_torch(job.command):
        with stop_immediately(), report_out_of_memory():
            command = importlib.import_module(f"gpipe_cli.commands.{job.command.replace('-', '_')}")
        if not gc.isenabled():  # __main__ disabled it for the imports
            # Imported modules live until the end, so exclude them from every later collection.
            gc.freeze()
            gc.enable()
        # Entering this again raises a stop that an import has swallowed.
        with stop_immediately(), report_out_of_memory():
            for note in job.notes if is_main_process() else ():
                print_status(note)
            summary: Summary = command.run(job.settings, job)
    return summary


def import_torch(command: str) -> AbstractContextManager[None]:
    """Import torch if the command needs it, and load its compiler inside only if something uses it."""
    if command in WITHOUT_TORCH:
        return nullcontext()
    activity.now("importing torch")
    with report_out_of_memory():
        from gpipe_cli.torch_internals.deferred_compiler import deferred_compiler
    return deferred_compiler()


def run_as_rank(folder: str) -> NoReturn:
    """Run one rank of a job in this process; the launcher starts every rank with this function."""
    run_rank(folder, _run_task)


def _run_task(files: RankFiles, task: RankTask) -> Summary:
    job = job_of_rank(files, task)
    with report_out_of_memory():
        command = importlib.import_module(f"gpipe_cli.commands.{job.command}")
        summary: Summary = command.run(job.settings, job)
    return summary
