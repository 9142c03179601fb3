"""Run one job in this process: import its command, and with it torch, and hand it the settings."""

from __future__ import annotations

import gc
import importlib
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NoReturn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.config.compose import JobConfig, Request, settings_of
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.launch.rank import is_main_process, run_rank
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.report.output import print_status
from gpipe_cli.training.signals import stop_immediately

MEASURING_COMMANDS = ("balance", "profile", "plan")
"""They print their result after seconds or minutes; the user should see at once that they have begun."""
WITHOUT_TORCH = ("launch-script", "report", "runs", "cp")
"""They read and write files, and do so at once: importing torch takes seconds."""


def run_job(
    request: Request,
    config: JobConfig,
    *,
    json: bool,
    dry_run: bool,
    began: float,
    debug: bool = False,
    in_sweep: bool = False,
) -> Summary:
    """began: when the command did, by the monotonic clock; in_sweep: whether somebody else prints the results."""
    job = Job(
        command=request.command,
        overrides=config.overrides,
        line=command_line(request, request.words),
        tree=config.tree,
        model=config.model,
        in_sweep=in_sweep,
        json=json,
        dry_run=dry_run,
        debug=debug,
        began=began,
    )
    if request.command in MEASURING_COMMANDS and not in_sweep:
        print_status("importing torch and building the model")
    # Commands import torch. Composing, printing and rejecting a configuration must not wait for that.
    with nullcontext() if request.command in WITHOUT_TORCH else _torch():
        with report_out_of_memory():
            command = importlib.import_module(f"gpipe_cli.commands.{request.command.replace('-', '_')}")
        if not gc.isenabled():  # __main__ disabled it for the imports
            # Imported modules live until the end, so exclude them from every later collection.
            gc.freeze()
            gc.enable()
        with stop_immediately(), report_out_of_memory():
            for note in config.notes if is_main_process() else ():
                print_status(note)
            summary: Summary = command.run(config.settings, job)
    return summary


def _torch() -> AbstractContextManager[None]:
    """Import torch, and load its compiler inside only if something uses it."""
    with report_out_of_memory():
        from gpipe_cli.torch_internals.deferred_compiler import deferred_compiler
    return deferred_compiler()


def command_line(request: Request, words: Sequence[str]) -> str:
    """The command line with these words, as a user would type it."""
    flags = {"--config-dir": request.config_dir, "--config-name": request.config_name}
    flag_words = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    return shlex.join(["gpipe", request.command, *words, *flag_words])


def run_as_rank(folder: str) -> NoReturn:
    """Run one rank of a job in this process; the launcher starts every rank with this function."""
    run_rank(folder, _run_task)


def _run_task(files: RankFiles, task: RankTask) -> Summary:
    job = Job.of_rank(files, task)
    settings = settings_of(job.tree, job.command, job.overrides)
    if task.run_directory is not None:  # after a failure all ranks resume from the last snapshot
        assert isinstance(settings, TrainConfig), "only a training run has a directory"
        settings = replace(settings, resume="auto", run_dir=task.run_directory)
    with report_out_of_memory():
        summary: Summary = importlib.import_module(f"gpipe_cli.commands.{job.command}").run(settings, job)
    return summary
