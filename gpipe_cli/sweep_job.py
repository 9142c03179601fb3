"""A job of a sweep, as a launcher of Hydra runs it: in this process, in a worker of joblib or in a job of submitit.

Whoever started the sweep shares a folder with its jobs: each writes its result there, and a file asks all to stop.
"""

from __future__ import annotations

import _thread
import hashlib
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import Request, compose
from gpipe_cli.config.sources import register_resolver
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.errors import Interrupted, exit_code
from gpipe_cli.jobs import run_job
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.redaction import redacted
from gpipe_cli.report import output
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.sweep_results import JobResult
from gpipe_cli.runs.directory import write_json
from gpipe_cli.runs.reader import RunReader, has_settings
from gpipe_cli.training.signals import (
    STOP_SIGNALS,
    SignalInbox,
    as_stopped,
    handlers_installed,
    install_handlers,
)

STOP = "stop"
LONGEST_NAME = 60
POLL_SECONDS = 0.1
PROCESS = socket.gethostname(), os.getpid()


@final
@dataclass(frozen=True)
class Task:
    request: Request
    """With the words that all jobs share."""
    swept: Mapping[str, str]
    """The keys of the other words, and how they were given, perhaps with a plus sign."""
    folder: Path
    """For results, and for the request to stop."""
    makes_runs: bool
    invocation: Invocation
    began: float
    """When the command did, in seconds since 1970: a job may run on another machine."""
    process: tuple[str, int] = PROCESS

    def __call__(self, _: object) -> float | None:
        """Run the job that Hydra has configured, and return the value that a sweeper optimizes, if it has one."""
        if (self.folder / STOP).exists():
            return None
        given = HydraConfig.get()
        pairs = (word.lstrip("+").partition("=") for word in given.overrides.task)
        words = tuple(f"{self.swept.get(key, key)}={value}" for key, _, value in pairs)
        result = JobResult(int(given.job.num), (*self.request.words, *words), " ".join(words))
        file = self.folder / f"{result.job}.json"
        write_json(file, asdict(result))
        is_worker = self.process != PROCESS
        # The folder may be another one in a worker, or because of hydra.job.chdir.
        with self._as_worker(result.job) if is_worker else nullcontext(), chdir(given.runtime.cwd):
            result = self._run(result, given)
        write_json(file, asdict(result))
        if result.stopped and not is_worker:
            raise KeyboardInterrupt  # after any Exception, Hydra would go on with the next job
        return result.best if result.exit_code == 0 else None

    def _run(self, result: JobResult, given: Any) -> JobResult:
        """given: Hydra's configuration of the job."""
        run = Path(given.runtime.output_dir)
        if run.is_relative_to(Path.cwd()) and not given.job.chdir:
            run = run.relative_to(Path.cwd())  # as people give it
        try:
            result = self._run_in(run, result, chdir(run) if given.job.chdir else nullcontext())
        except BaseException as error:  # noqa: BLE001 - a layer may raise anything; the table reports it
            if self.invocation.debug:
                traceback.print_exception(error)
            at_once = type(error) is KeyboardInterrupt
            error = Interrupted("stopped by Ctrl-C") if at_once else as_stopped(error)
            result = replace(result, exit_code=exit_code(error), error=redacted(describe(error)))
            if result.failed:
                result = replace(result, error=f"FAILED ({result.exit_code}): {result.error}")
                _say(result, str(result.error))
        if self.makes_runs and has_settings(run):
            best = RunReader(run).best()
            result = replace(result, run_dir=str(run), best=None if best is None else best.value)
        return result

    def _run_in(self, run: Path, result: JobResult, folder: AbstractContextManager[Any]) -> JobResult:
        """run: its directory, which an earlier launch of the sweep may have left. folder: enters that of the job."""
        result = replace(result, exit_code=0, error=None)
        resumes = self.makes_runs and has_settings(run)
        if resumes and (summary := RunReader(run).json("summary.json")):
            _say(result, "finished earlier, skipped")
            return replace(result, summary=summary, finished_earlier=True)
        _say(result, f"{result.label}{', resuming' if resumes else ''}")
        request = replace(self.request, words=tuple(result.overrides))
        config = compose(request)
        add_current_folder(getattr(config.settings, "allow", ()))  # before it is left
        if self.makes_runs:
            config = config.with_values(run_dir=str(run), resume="auto" if resumes else None)
        began = time.monotonic() - (time.time() - self.began)
        flags = self.invocation
        with folder:
            summary = run_job(
                replace(config, json=flags.json, dry_run=flags.dry_run, began=began, in_sweep=True)
            )
        return replace(result, summary=summary)

    @contextmanager
    def _as_worker(self, job: int) -> Iterator[None]:
        """Inside, this process belongs to the sweep: it ends with it, and a request to stop is a signal to it."""
        install_handlers()  # for good: a worker that ends between two jobs would take the others with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        multiprocessing.set_start_method(None, force=True)  # that of joblib cannot start torch's data workers
        _, parent = self.process
        if os.getppid() == parent:
            die_with_parent(parent)
        os.environ["TERM"] = "dumb"  # several jobs share the terminal, which has room for one panel
        output.line_begin = f"job {job}: "
        with sharing_stops(self.folder, in_worker=True):
            yield


def _say(result: JobResult, text: str) -> None:
    output.print_status(f"job {result.job}: {text}".removeprefix(output.line_begin))


@contextmanager
def sharing_stops(folder: Path, *, in_worker: bool = False, block: bool = False) -> Iterator[SignalInbox]:
    """Inside, a signal to the process that started the sweep is one to all jobs.

    block: keep signals from the processes that are started inside, which do not know what to do with them.
    """
    blocked = set(STOP_SIGNALS) if block else set()
    stop, ended = folder / STOP, threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            if pending := signal.sigpending() & blocked:
                _thread.interrupt_main(signal.Signals(signal.sigwait(pending)))
            if not in_worker and inbox.first is not None:
                stop.touch()
            elif in_worker and inbox.first is None and stop.exists():
                # A terminal may send SIGINT to this process as well, and a second one ends a job at once.
                os.kill(os.getpid(), signal.SIGTERM)

    with handlers_installed() as inbox:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        thread = threading.Thread(target=watch, name="gpipe-sweep", daemon=True)
        thread.start()
        try:
            yield inbox
        finally:
            ended.set()
            thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def job_name(words: Iterable[str]) -> str:
    """The name of a job's directory: by its content, because a sweep that is resumed may count in another way."""
    given = sorted(word.lstrip("+") for word in words)
    readable = "_".join(re.sub(r"[^\w.+-]+", "-", word, flags=re.ASCII) for word in given) or "job"
    digest = hashlib.sha256("\0".join(given).encode()).hexdigest()
    return f"{readable[:LONGEST_NAME]}-{digest[:8]}"


# Where launchers unpickle a Task, they import this module first, and then resolve the name of the directory.
register_resolver("gpipe_job", job_name)
