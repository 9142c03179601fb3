"""Run the jobs of a command line: a single one, or those of a sweep one after the other."""

from __future__ import annotations

import gc
import importlib
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, final

from gpipe_cli.accelerator.memory import report_out_of_memory
from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import Composition, JobConfig, settings_of
from gpipe_cli.config.hydra_loader import CUSTOM
from gpipe_cli.config.overrides import group_to_recipe
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import Stopped, exit_code
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.launch.rank_process import run_rank
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.tables import print_rows
from gpipe_cli.run.job import Job, Summary, model_name
from gpipe_cli.training.signals import stop_immediately


@dataclass(frozen=True)
class Outcome:
    overrides: tuple[str, ...]
    summary: Summary | None = None
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        return 0 if self.error is None else exit_code(self.error)


@final
class Jobs:
    def __init__(self, command: str, invocation: Invocation, composition: Composition) -> None:
        self._command, self._invocation, self._composition = command, invocation, composition
        self._outcomes: list[Outcome] = []

    def run(self) -> int:
        """Run every job and return the exit code; a sweep continues after a failure and ends with a table."""
        try:
            for number, overrides in enumerate(self._composition.jobs):
                self._run(overrides, number if self._invocation.multirun else None)
        except (KeyboardInterrupt, Stopped):  # a stop ends the whole sweep
            if self._invocation.multirun:
                self._print_sweep()
            raise
        return self._finish()

    def _run(self, overrides: tuple[str, ...], number: int | None) -> None:
        try:
            config = self._composition.job(overrides)
            job = self._job(config, number)
            # Commands import torch. Composing, printing and rejecting a configuration must not wait for that.
            with report_out_of_memory():
                command = importlib.import_module(f"gpipe_cli.commands.{self._command}")
            if not gc.isenabled():  # __main__ disabled it for the imports
                # Imported modules live until the end, so exclude them from every later collection.
                gc.freeze()
                gc.enable()
            with stop_immediately(), report_out_of_memory():
                self._outcomes.append(Outcome(overrides, summary=command.run(config.settings, job)))
        except KeyboardInterrupt:
            raise
        except Stopped as error:
            self._outcomes.append(Outcome(overrides, error=error))
            raise
        except BaseException as error:  # noqa: BLE001 - a layer may raise anything; `_finish` reports it
            self._outcomes.append(Outcome(overrides, error=error))
            if number is not None:
                if self._invocation.debug:
                    traceback.print_exception(error)
                sys.stderr.write(f"job {number} {_reason(self._outcomes[-1])}\n")

    def _finish(self) -> int:
        """Print the result of a sweep, or raise the error of the single job; return the exit code."""
        if self._invocation.multirun:
            self._print_sweep()
            return next((outcome.exit_code for outcome in self._outcomes if outcome.exit_code), 0)
        for outcome in self._outcomes:
            if outcome.error is not None:
                raise outcome.error
            if self._invocation.json:
                sys.stdout.write(f"{json.dumps(outcome.summary)}\n")
        return 0

    def _job(self, config: JobConfig, number: int | None) -> Job:
        return Job(
            command=self._command,
            overrides=config.overrides,
            line=self._line(config.overrides),
            tree=config.tree,
            model=model_name(config),
            number=number,
            json=self._invocation.json,
            dry_run=self._invocation.dry_run,
        )

    def _line(self, overrides: Sequence[str]) -> str:
        """The command line as you typed it; for a job of a sweep, with the values of that job."""
        words = overrides if self._invocation.multirun else self._invocation.words
        own = group_to_recipe(word for word in words if not word.endswith(f"={CUSTOM}"))
        flags = {"--config-dir": self._invocation.config_dir, "--config-name": self._invocation.config_name}
        flag_words = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
        return shlex.join(["gpipe", self._command, *own, *flag_words])

    def _print_sweep(self) -> None:
        if not self._outcomes:
            return
        if self._invocation.json:
            rows = [
                {
                    "overrides": outcome.overrides,
                    "exit_code": outcome.exit_code,
                    "error": _reason(outcome),
                    **(outcome.summary or {}),
                }
                for outcome in self._outcomes
            ]
            sys.stdout.write(f"{json.dumps(rows)}\n")
            return
        summaries = [outcome.summary or {} for outcome in self._outcomes]
        # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
        columns = list(
            dict.fromkeys(
                name for summary in summaries for name in summary if isinstance(summary[name], float)
            )
        )
        common = set.intersection(*(set(outcome.overrides) for outcome in self._outcomes))
        table = [
            (
                index,
                " ".join(override for override in outcome.overrides if override not in common),
                *(summary.get(name) for name in columns),
                _reason(outcome) or summary.get("run_dir"),
            )
            for index, (outcome, summary) in enumerate(zip(self._outcomes, summaries, strict=True))
        ]
        failed = sum(outcome.exit_code != 0 for outcome in self._outcomes)
        print_rows(f"{len(table)} jobs, {failed} failed", ("job", "overrides", *columns, "result"), table)


def _reason(outcome: Outcome) -> str | None:
    if outcome.error is None:
        return None
    return f"FAILED ({outcome.exit_code}): {describe(outcome.error)}"


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
