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
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import JobConfig, Request, compose
from gpipe_cli.config.files import load_yaml
from gpipe_cli.config.sources import register_resolver
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import override_key
from gpipe_cli.errors import INTERRUPTED, ConfigError, Interrupted, exit_code
from gpipe_cli.jobs import run_job
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.redaction import redacted
from gpipe_cli.report import output
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.run_files import RunFiles
from gpipe_cli.report.sweep_results import JobResult, best_value
from gpipe_cli.torch_internals import torchrun
from gpipe_cli.training.run_directory import write_json
from gpipe_cli.training.signals import (
    STOP_SIGNALS,
    StopRequests,
    as_stopped,
    handlers_installed,
    install_handlers,
)

STOP = "stop.json"
LAUNCH_KEYS = ("run_dir", "resume", "reset_optimizer", "allow")
"""Keys of one launch, in which the saved configuration of a job may differ."""
LONGEST_NAME = 60
POLL_SECONDS = 0.1


@final
class SweepStopped(BaseException):
    """Ends a sweep whose jobs run in this process: Hydra goes on with the next job after any Exception."""


def _process() -> str:
    return f"{socket.gethostname()} {os.getpid()}"


@final
@dataclass(frozen=True)
class Task:
    request: Request
    """With the words that all jobs share."""
    swept: tuple[str, ...]
    """The words with several values, as they were given."""
    folder: Path
    """For results, and for the request to stop."""
    has_directories: bool
    invocation: Invocation
    began: float
    """When the command did, in seconds since 1970: a job may run on another machine."""
    process: str = field(default_factory=_process)

    def __call__(self, _: object) -> float | None:
        """Run the job that Hydra has configured, and return the value that a sweeper optimizes, if it has one."""
        if (self.folder / STOP).exists():
            return None
        given = HydraConfig.get()
        words = tuple(map(self._as_given, given.overrides.task))
        number = int(given.job.num)
        result = JobResult(number, (*self.request.words, *words), " ".join(words))
        write_json(self.folder / f"{number}.json", asdict(result))
        is_worker = self.process != _process()
        with self._as_worker(number) if is_worker else nullcontext():
            result = self._run(result, given)
        write_json(self.folder / f"{number}.json", asdict(result))
        if result.stopped:
            request_stop(self.folder, result.exit_code, result.message)
            if not is_worker:
                raise SweepStopped
        return None if result.failed or result.stopped else result.best

    def _as_given(self, word: str) -> str:
        """Hydra gets `++key=value`, whatever was given."""
        key = override_key(word)
        before = next((other for other in self.swept if override_key(other) == key), "")
        return f"{'+' * (len(before) - len(before.lstrip('+')))}{word.lstrip('+')}"

    def _run(self, result: JobResult, given: Any) -> JobResult:
        """given: Hydra's configuration of the job."""
        run = Path(given.runtime.output_dir) if self.has_directories else None
        try:
            request = replace(self.request, words=tuple(result.overrides))
            with chdir(given.runtime.cwd):  # hydra.job.chdir has changed it, or a worker has another one
                config = compose(request)
                add_current_folder(getattr(config.settings, "allow", ()))
                run = run if run is None or given.job.chdir else shown_path(run)
            with nullcontext() if given.job.chdir else chdir(given.runtime.cwd):
                result = self._run_in(run, request, config, result)
            result = replace(result, exit_code=0, message="")
        except BaseException as error:  # noqa: BLE001 - a layer may raise anything; the table reports it
            if self.invocation.debug:
                traceback.print_exception(error)
            at_once = type(error) is KeyboardInterrupt
            error = Interrupted("stopped by Ctrl-C at once") if at_once else as_stopped(error)
            result = replace(result, exit_code=exit_code(error), message=redacted(describe(error)))
            if result.failed:
                self._say(f"job {result.number}: {result.reason}")
        with chdir(given.runtime.cwd):
            if run is not None and (run / "config.yaml").exists():
                result = replace(result, run_dir=str(run), best=best_value(run))
        return result

    def _run_in(self, run: Path | None, request: Request, config: JobConfig, result: JobResult) -> JobResult:
        """run: its directory, which an earlier launch of the sweep may have left."""
        announced, resume = f"job {result.number}: {result.label}", None
        if run is not None:
            if (run / "config.yaml").exists():
                _check_same(run, config)
                if summary := RunFiles(run).json("summary.json"):
                    self._say(f"job {result.number}: finished earlier, skipped")
                    return replace(result, summary=summary, finished_earlier=True)
                announced, resume = f"{announced}, resuming", "auto"
            config = config.with_values(run_dir=str(run), resume=resume)
        self._say(announced)
        began = time.monotonic() - (time.time() - self.began)
        flags = self.invocation
        summary = run_job(request, config, json=flags.json, dry_run=flags.dry_run, began=began, in_sweep=True)
        return replace(result, summary=summary)

    @contextmanager
    def _as_worker(self, number: int) -> Iterator[None]:
        """Inside, this process belongs to the sweep: it ends with it, and a request to stop is a signal to it."""
        inbox = (
            install_handlers()
        )  # for good: a worker that ends between two jobs would take the others with it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        multiprocessing.set_start_method(None, force=True)  # that of joblib cannot start torch's data workers
        parent = int(self.process.split()[-1])
        if os.getppid() == parent:
            die_with_parent(parent)
        os.environ["TERM"] = "dumb"  # several jobs share the terminal, which has room for one panel
        output.line_begin = f"job {number}: "

        def look() -> None:
            if (request := requested_stop(self.folder)) and inbox.first is None:
                by_keyboard = request[0] == INTERRUPTED
                os.kill(os.getpid(), signal.SIGINT if by_keyboard else signal.SIGTERM)

        with _watching(look):
            yield

    def _say(self, line: str) -> None:
        if not torchrun.follows():
            print_status(line.removeprefix(output.line_begin))


def shown_path(path: Path) -> Path:
    """The path as people give it: relative to the current folder if it is below it."""
    below = path.is_relative_to(Path.cwd()) and path != Path.cwd()
    return path.relative_to(Path.cwd()) if below else path


def _check_same(run: Path, config: JobConfig) -> None:
    """Refuse to take the run of another job for that of this one."""
    saved: Any = OmegaConf.to_container(load_yaml(run / "config.yaml", base=run))
    own: Any = OmegaConf.to_container(config.tree)
    ignored = dict.fromkeys(LAUNCH_KEYS)
    # A plan that was searched for has become part of the saved configuration.
    if {**saved, **ignored} != {**own, **ignored} and not own["plan"]["auto"]:
        raise ConfigError(f"{run}: has a run with other settings; choose another hydra.sweep.dir")


def request_stop(folder: Path, exit_code: int, reason: str) -> None:
    """Ask all jobs to save and to stop; the first request counts."""
    if not (folder / STOP).exists():
        write_json(folder / STOP, {"exit_code": exit_code, "reason": reason.partition(";")[0]})


def requested_stop(folder: Path) -> tuple[int, str] | None:
    """The exit code and the reason, if the jobs are asked to stop."""
    match RunFiles(folder).json(STOP):
        case {"exit_code": int(code), "reason": str(reason)}:
            return code, reason
    return None


@contextmanager
def passing_signals_on(folder: Path, *, block: bool) -> Iterator[None]:
    """Inside, a signal to this process is a request to all jobs.

    block: keep signals from the processes that are started inside, which do not know what to do with them.
    """
    blocked = set(STOP_SIGNALS) if block else set()
    with handlers_installed() as inbox:

        def look() -> None:
            if pending := signal.sigpending() & blocked:
                _thread.interrupt_main(signal.Signals(signal.sigwait(pending)))
            if request := StopRequests(inbox).request:
                request_stop(folder, request.error("").exit_code, f"stopped by {request.reason}")

        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with _watching(look):
                yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _watching(look: Callable[[], None]) -> Iterator[None]:
    """Inside, a thread calls the function again and again."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            look()

    thread = threading.Thread(target=watch, name="gpipe-sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def job_name(words: Iterable[str]) -> str:
    """The name of a job's directory: by its content, because a sweep that is resumed may count in another way."""
    given = sorted(word.lstrip("+") for word in words)
    readable = "_".join(re.sub(r"[^\w.+-]+", "-", word, flags=re.ASCII) for word in given) or "job"
    digest = hashlib.sha256("\0".join(given).encode()).hexdigest()
    return f"{readable[:LONGEST_NAME]}-{digest[:8]}"


# Where launchers unpickle a Task, they import this module first, and then resolve the name of the directory.
register_resolver("gpipe_job", job_name)
