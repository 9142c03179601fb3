"""The jobs of one command line: one, or those of a sweep, run in turn. Results and failures are kept."""

from __future__ import annotations

import gc
import importlib
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import Composition, JobConfig, settings_of
from gpipe_cli.config.hydra_loader import CUSTOM
from gpipe_cli.config.overrides import group_to_recipe
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.engines.memory import memory_watched
from gpipe_cli.errors import Stopped
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.launch.rank_process import run_rank
from gpipe_cli.report.failure import describe, exit_code
from gpipe_cli.report.tables import print_rows
from gpipe_cli.run.job import Job, Rank, Summary
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
        """Run every job; a sweep goes on after a failure and shows at its end what came of each. The exit code."""
        try:
            for number, overrides in enumerate(self._composition.jobs):
                self._run(overrides, number if self._invocation.multirun else None)
        except (KeyboardInterrupt, Stopped):  # who asks for a stop means all jobs
            if self._invocation.multirun:
                self._show_sweep()
            raise
        return self._finish()

    def _run(self, overrides: tuple[str, ...], number: int | None) -> None:
        try:
            composed = self._composition.job(overrides)
            job = self._job(composed, number)
            # Only now: composing, printing and rejecting a configuration must not wait for torch.
            with memory_watched():
                command = importlib.import_module(f"gpipe_cli.commands.{self._command}")
            if not gc.isenabled():  # `__main__` disabled it
                # What was imported stays, so the collector need not look at it again.
                gc.freeze()
                gc.enable()
            with stop_immediately(), memory_watched():
                self._outcomes.append(Outcome(overrides, summary=command.run(composed.settings, job)))
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
        """Show what a sweep did, or raise what the one job raised; the exit code."""
        if self._invocation.multirun:
            self._show_sweep()
            return next((one.exit_code for one in self._outcomes if one.exit_code), 0)
        for outcome in self._outcomes:
            if outcome.error is not None:
                raise outcome.error
            if self._invocation.json:
                sys.stdout.write(f"{json.dumps(outcome.summary)}\n")
        return 0

    def _job(self, composed: JobConfig, number: int | None) -> Job:
        return Job(
            command=self._command,
            overrides=composed.overrides,
            line=self._line(composed.overrides),
            tree=composed.tree,
            model=_model_name(composed),
            number=number,
            json=self._invocation.json,
            dry_run=self._invocation.dry_run,
        )

    def _line(self, overrides: Sequence[str]) -> str:
        """As it was typed; a job of a sweep with its own values."""
        words = overrides if self._invocation.multirun else self._invocation.words
        own = group_to_recipe(word for word in words if not word.endswith(f"={CUSTOM}"))
        flags = {"--config-dir": self._invocation.config_dir, "--config-name": self._invocation.config_name}
        given = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
        return shlex.join(["gpipe", self._command, *own, *given])

    def _show_sweep(self) -> None:
        if not self._outcomes:
            return
        if self._invocation.json:
            rows = [
                {
                    "overrides": one.overrides,
                    "exit_code": one.exit_code,
                    "error": _reason(one),
                    **(one.summary or {}),
                }
                for one in self._outcomes
            ]
            sys.stdout.write(f"{json.dumps(rows)}\n")
            return
        found = [one.summary or {} for one in self._outcomes]
        numbers = _measured(found)
        common = set.intersection(*(set(one.overrides) for one in self._outcomes))
        rows_ = [
            (
                index,
                " ".join(word for word in one.overrides if word not in common),
                *(summary.get(name) for name in numbers),
                _reason(one) or summary.get("run_dir"),
            )
            for index, (one, summary) in enumerate(zip(self._outcomes, found, strict=True))
        ]
        failed = sum(one.exit_code != 0 for one in self._outcomes)
        print_rows(f"{len(rows_)} jobs, {failed} failed", ("job", "overrides", *numbers, "result"), rows_)


def _measured(summaries: Sequence[Summary]) -> list[str]:
    """What was measured, in the order of the summaries: what was asked for is a whole number or a word."""
    names = (name for summary in summaries for name, value in summary.items() if isinstance(value, float))
    return list(dict.fromkeys(names))


def _reason(outcome: Outcome) -> str | None:
    if outcome.error is None:
        return None
    return f"FAILED ({outcome.exit_code}): {describe(outcome.error)}"


def _model_name(composed: JobConfig) -> str:
    choice = composed.choices.get("model")
    if choice not in (None, CUSTOM):
        return str(choice)
    plain: Any = OmegaConf.to_container(composed.tree)  # unresolved, as it becomes the name of a folder
    return str((plain.get("model") or {}).get("_target_", "model")).rpartition(".")[2]


def run_as_rank(folder: str) -> NoReturn:
    """Run one rank of a job in this process; the launcher starts every rank with this function."""
    run_rank(folder, _run_task)


def _run_task(files: RankFiles, task: RankTask) -> Summary:
    tree = OmegaConf.create(task.config)
    assert isinstance(tree, DictConfig), "the launcher wrote a mapping"
    job = Job(
        task.command,
        tuple(task.overrides),
        line=task.line,
        tree=tree,
        model=task.model,
        number=task.number if task.run_directory is None else None,
        json=True,  # the launcher prints the result
        dry_run=False,
        rank=Rank(files, task.balance, task.began),
    )
    settings = settings_of(tree, task.command, job.overrides)
    if task.run_directory is not None:  # after a failure all ranks resume from the last snapshot
        assert isinstance(settings, TrainConfig), "only a training run has a directory"
        settings = replace(settings, resume="auto", run_dir=task.run_directory)
    with memory_watched():
        summary: Summary = importlib.import_module(f"gpipe_cli.commands.{task.command}").run(settings, job)
    return summary
