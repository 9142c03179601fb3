"""Run one job in this process: import its command, and with it torch, and hand it the settings."""

from __future__ import annotations

import gc
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.config.compose import job_of_rank
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.launch.rank import is_main_process, run_rank
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.report.output import print_status
from gpipe_cli.training.signals import stop_immediately

MEASURING_COMMANDS = ("balance", "profile", "plan")
"""They print their result after seconds or minutes; the user should see at once that they have begun."""
WITHOUT_TORCH = ("launch-script", "report", "runs", "cp")
"""They read and write files, and do so at once: importing torch takes seconds."""


def run_job(job: Job) -> Summary:
    if job.command in MEASURING_COMMANDS and not job.in_sweep:
        print_status("importing torch and building the model")
    # Commands import torch. Composing, printing and rejecting a configuration must not wait for that.
    with nullcontext() if job.command in WITHOUT_TORCH else _torch():
        with report_out_of_memory():
            command = importlib.import_module(f"gpipe_cli.commands.{job.command.replace('-', '_')}")
        if not gc.isenabled():  # __main__ disabled it for the imports
            # Imported modules live until the end, so exclude them from every later collection.
            gc.freeze()
            gc.enable()
        with stop_immediately(), report_out_of_memory():
            for note in job.notes if is_main_process() else ():
                print_status(note)
            summary: Summary = command.run(job.settings, job)
    return summary


def _torch() -> AbstractContextManager[None]:
    """Import torch, and load its compiler inside only if something uses it."""
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
