"""Run a job of a command line in this process: import its command, and with it torch, and hand it the settings."""

from __future__ import annotations

import gc
import importlib
import json
import shlex
import sys
from dataclasses import dataclass, replace
from typing import NoReturn, final

from gpipe_cli.accelerator.memory import report_out_of_memory
from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import Composition, JobConfig, settings_of
from gpipe_cli.config.hydra_loader import CUSTOM
from gpipe_cli.config.overrides import group_to_recipe, without_keys
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.launch.rank_process import run_rank
from gpipe_cli.report.output import print_status
from gpipe_cli.run.job import Job, Summary, model_name
from gpipe_cli.run.sweep_directory import DIRECTORY_KEYS
from gpipe_cli.training.signals import stop_immediately

MEASURING_COMMANDS = ("balance", "profile", "plan")
"""They print their result after seconds or minutes; the user should see at once that they have begun."""


@final
@dataclass(frozen=True)
class Jobs:
    """The jobs of a command line: one, or those of a sweep."""

    command: str
    invocation: Invocation
    composition: Composition
    began: float
    """When the command did, by the monotonic clock."""

    def run_single(self, number: int | None) -> int:
        """Run the only job and print its result; number: of the job of a sweep, which prints the results itself."""
        (overrides,) = self.composition.jobs
        summary = self.run(self.composition.job(overrides), number)
        if self.invocation.json:
            sys.stdout.write(f"{json.dumps(summary)}\n")
        return 0

    def run(self, config: JobConfig, number: int | None) -> Summary:
        if self.command in MEASURING_COMMANDS and number is None:
            print_status("importing torch and building the model")
        # Commands import torch. Composing, printing and rejecting a configuration must not wait for that.
        with report_out_of_memory():
            from gpipe_cli.torch_internals.deferred_compiler import deferred_compiler
        with deferred_compiler():
            with report_out_of_memory():
                command = importlib.import_module(f"gpipe_cli.commands.{self.command}")
            if not gc.isenabled():  # __main__ disabled it for the imports
                # Imported modules live until the end, so exclude them from every later collection.
                gc.freeze()
                gc.enable()
            with stop_immediately(), report_out_of_memory():
                for note in config.notes:
                    print_status(note)
                summary: Summary = command.run(config.settings, self._job(config, number))
        return summary

    def words(self, overrides: tuple[str, ...]) -> list[str]:
        """The words after `gpipe` that run one job, as a user would type them."""
        own = group_to_recipe(word for word in overrides if not word.endswith(f"={CUSTOM}"))
        flags = {"--config-dir": self.invocation.config_dir, "--config-name": self.invocation.config_name}
        flag_words = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
        return [self.command, *own, *flag_words]

    def _job(self, config: JobConfig, number: int | None) -> Job:
        words = self.invocation.words if number is None else config.overrides
        if number is not None:  # a job that is repeated alone has a directory of its own
            words = without_keys(words, DIRECTORY_KEYS)
        return Job(
            command=self.command,
            overrides=config.overrides,
            line=shlex.join(["gpipe", *self.words(words)]),
            tree=config.tree,
            model=model_name(config),
            number=number,
            json=self.invocation.json,
            dry_run=self.invocation.dry_run,
            began=self.began,
        )


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
