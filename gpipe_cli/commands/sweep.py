"""Run the jobs of a sweep, one after the other or side by side, and print their results.

A failure does not end the sweep; a request to stop does. A sweep of training runs has a directory, so that the same
line finds its jobs again: it skips those that have finished and resumes the others.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import final

from gpipe_cli.commands.jobs import Jobs
from gpipe_cli.config.overrides import without_keys
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError, Interrupted, Stopped, exit_code
from gpipe_cli.launch.job_processes import run_side_by_side
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.sweep_results import JobResult, print_sweep, print_sweep_json, swept_words
from gpipe_cli.run.job import Summary
from gpipe_cli.run.sweep_directory import DIRECTORY_KEYS, SweepDirectory, is_resumable, open_sweep
from gpipe_cli.torch_internals import torchrun
from gpipe_cli.training.signals import StopNow


@final
class Sweep:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._overrides = jobs.composition.jobs
        self._line = shlex.join(["gpipe", jobs.command, *jobs.invocation.typed])
        self._directory: SweepDirectory | None = None
        self._results: dict[int, JobResult] = {}

    def run(self) -> int:
        """Run every job that has not finished, and return the first exit code that is not 0."""
        if self._side_by_side > 1:
            self._check_side_by_side()
        with self._open_directory() as self._directory:
            try:
                unfinished = list(self._unfinished())
                if unfinished and self._side_by_side > 1:
                    self._run_side_by_side(unfinished)
                else:
                    for number in unfinished:
                        self._run_here(number)
            except (KeyboardInterrupt, Stopped) as error:  # ends the whole sweep
                self._print_results()
                if self._directory is None:
                    raise
                raise self._stopped(error) from error
        self._print_results()
        codes = [result.exit_code for _, result in sorted(self._results.items())]
        return next((code for code in codes if code), 0)

    @property
    def _side_by_side(self) -> int:
        return self._jobs.invocation.jobs

    @property
    def _has_directory(self) -> bool:
        return (
            self._jobs.command == "train"
            and not self._jobs.invocation.dry_run
            and not torchrun.is_rank()  # several processes would have to agree on it
            and is_resumable(self._jobs.composition)
        )

    def _open_directory(self) -> AbstractContextManager[SweepDirectory | None]:
        return open_sweep(self._jobs.composition, self._line) if self._has_directory else nullcontext()

    def _check_side_by_side(self) -> None:
        """Before the sweep has a directory."""
        if not self._has_directory:
            raise ConfigError(
                f"jobs={self._side_by_side}: only new runs of gpipe train run side by side; leave it out"
            )
        self._shares(0)

    def _unfinished(self) -> Iterator[int]:
        """The numbers of the jobs that have to run; says which have finished."""
        directory = self._directory
        if directory is not None:
            begin = "resuming the sweep in" if directory.resumes else "sweep directory:"
            print_status(f"{begin} {directory.path}")
        for number in range(len(self._overrides)):
            summary = directory.summary(number) if directory is not None and directory.resumes else None
            if summary is None:
                yield number
            else:
                self._keep(number, summary, finished_earlier=True)
                print_status(f"job {number}: finished earlier, skipped")
        if len(self._results) == len(self._overrides):
            print_status("all jobs have finished; give run_dir=<new directory> to run them again")

    def _run_here(self, number: int) -> None:
        self._announce(number)
        try:
            config = self._jobs.composition.job(self._overrides[number])
            if self._directory is not None:
                resume = "auto" if self._directory.was_started(number) else None
                config = config.with_values(run_dir=str(self._directory.path), resume=resume)
            self._keep(number, self._jobs.run(config, number))
        except KeyboardInterrupt:
            raise
        except Stopped as error:
            self._keep(number, exit_code=error.exit_code, message=describe(error))
            raise
        except BaseException as error:  # noqa: BLE001 - a layer may raise anything; the table reports it
            if self._jobs.invocation.debug:
                traceback.print_exception(error)
            self._fail(number, exit_code(error), describe(error))

    def _run_side_by_side(self, numbers: Iterable[int]) -> None:
        shares = dict.fromkeys(" ".join(share) for share in self._shares(0))
        given = " or ".join(filter(None, shares)) or "as many threads as it has alone"
        print_status(
            f"jobs={self._side_by_side}: each job runs with {given}; "
            "a sequential sweep with the same threads gives the same bits"
        )
        lines: dict[int, list[list[str]]] = {}
        for number in numbers:
            try:
                lines[number] = self._lines_by_slot(number)
            except ConfigError as error:  # of this combination of values
                self._fail(number, error.exit_code, describe(error))

        def start(number: int, slot: int) -> list[str]:
            self._announce(number)
            return lines[number][slot]

        stop: Stopped | None = None
        with closing(run_side_by_side(lines, self._side_by_side, start, self._jobs.began)) as exits:
            for ended in exits:
                if ended.stopped:
                    self._keep(ended.number, exit_code=ended.exit_code, message=ended.message)
                    kind = Interrupted if ended.exit_code == Interrupted.exit_code else Stopped
                    stop = kind(ended.message)
                elif ended.exit_code:
                    self._fail(ended.number, ended.exit_code, ended.message)
                else:
                    assert self._directory is not None, "it was checked"
                    self._keep(ended.number, self._directory.summary(ended.number))
                    print_status(f"job {ended.number}: finished")
        if stop is not None:
            raise stop

    def _lines_by_slot(self, number: int) -> list[list[str]]:
        """For each slot the words after `gpipe` that run the job in it."""
        assert self._directory is not None, "it was checked"
        words = self._jobs.words(without_keys(self._overrides[number], DIRECTORY_KEYS))
        words.append(f"run_dir={self._directory.path}")
        if self._directory.was_started(number):
            words.append("resume=auto")
        return [[*words, *share] for share in self._shares(number)]

    def _shares(self, number: int) -> list[list[str]]:
        """For each slot the overrides that give the job its share of devices and cores."""
        from gpipe_cli.run.division import share_of_slot  # imports torch

        settings = self._jobs.composition.job(self._overrides[number]).settings
        assert isinstance(settings, TrainConfig), "only training runs have a directory"
        return [share_of_slot(settings, self._side_by_side, slot) for slot in range(self._side_by_side)]

    def _announce(self, number: int) -> None:
        resumes = self._directory is not None and self._directory.was_started(number)
        print_status(f"job {number}: {swept_words(self._overrides)[number]}{', resuming' if resumes else ''}")

    def _keep(
        self,
        number: int,
        summary: Summary | None = None,
        *,
        exit_code: int = 0,
        message: str = "",
        finished_earlier: bool = False,
    ) -> None:
        run_dir = None if self._directory is None else self._directory.job(number)
        self._results[number] = JobResult(
            self._overrides[number],
            summary,
            exit_code,
            message,
            run_dir if run_dir is not None and run_dir.exists() else None,
            finished_earlier,
        )

    def _fail(self, number: int, exit_code: int, message: str) -> None:
        self._keep(number, exit_code=exit_code, message=message)
        print_status(f"job {number} {self._results[number].reason}")

    def _stopped(self, error: KeyboardInterrupt | Stopped) -> Stopped:
        """The error that ends the command: how to resume the whole sweep instead of a single job."""
        if isinstance(error, StopNow):
            error = error.request.error(f"stopped by {error.request.reason}")
        elif isinstance(error, KeyboardInterrupt):
            error = Interrupted("stopped by Ctrl-C at once")
        finished = sum(result.summary is not None for result in self._results.values())
        reason = describe(error).partition(";")[0]
        return type(error)(
            f"{reason}; {finished} of {len(self._overrides)} jobs have finished; resume with: {self._line}"
        )

    def _print_results(self) -> None:
        settings = self._jobs.composition.job(self._overrides[0]).settings
        monitor = None
        if isinstance(settings, TrainConfig) and not self._jobs.invocation.dry_run:
            monitor = settings.snapshot.monitor or "loss"
        results = dict(sorted(self._results.items()))
        if self._jobs.invocation.json:
            print_sweep_json(results, monitor)
        else:
            print_sweep(results, monitor, len(self._overrides))
