"""A sweep, or a job with keys of Hydra: Hydra's sweeper and launcher run it, and each job is composed as one alone is.

Hydra gets the words that differ between the jobs, and those that configure it. A job composes its own words, so that
the same words mean the same in a sweep and alone; it runs in this process, in a worker of joblib or in a job of
submitit. A failure does not end a sweep; a request to stop does. A sweep of training runs has a directory with a
folder for each job and sweep.json, by which the same line finds it again: it skips the jobs that have finished and
resumes the others. Whoever started the sweep shares one more folder with its jobs: each writes its result there, and
a file asks all to stop.
"""

from __future__ import annotations

import _thread
import hashlib
import importlib
import json
import logging
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, final

import hydra
from hydra import initialize
from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.checks import check_files
from gpipe_cli.config.compose import compose, config_errors, prepared, sweep_words
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.sources import VERSION, register_resolver, store
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import (
    Request,
    override_key,
    quote_override,
    sets_hydra,
    sets_key,
    without_keys,
)
from gpipe_cli.errors import ConfigError, Interrupted, exit_code
from gpipe_cli.jobs import run_job
from gpipe_cli.launch.rank import is_rank
from gpipe_cli.process_lifetime import die_with_parent, temporary_folder
from gpipe_cli.report import output
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import JobResult, print_sweep, print_sweep_json
from gpipe_cli.runs.directory import lock_run_directory, make_run_directory, write_json
from gpipe_cli.runs.reader import SWEEP, RunReader, has_settings
from gpipe_cli.safe_files import redacted
from gpipe_cli.training.signals import (
    STOP_SIGNALS,
    SignalInbox,
    StopRequested,
    StopRequests,
    as_stopped,
    handlers_installed,
    install_handlers,
    stop_immediately,
)
from gpipe_cli.values import lower_is_better, quoted

PRIMARY = "gpipe_job"
LOCK, RESULTS = "sweep.lock", "results"
"""The lock is not that of a run, or the directory would be taken for one."""
SWEEPS = Path("runs", "sweep")
DIRECTORY_KEYS = ("run_dir", "resume")
"""Keys that say where a sweep is, and are no part of what it computes."""
SWEEP_DIR, SWEEPER = "hydra.sweep.dir", ("hydra.sweeper", "hydra/sweeper")
MAX_JUDGED = 100
"""Combinations to compose before the first job. Of more, each value is composed with the first ones of other keys."""
HYDRA = HydraConf(
    defaults=[
        *({group: "basic"} for group in ("launcher", "sweeper")),
        *({group: "none"} for group in ("hydra_logging", "job_logging")),
        *({group: "default"} for group in ("help", "hydra_help")),
        {"callbacks": None},
    ],
    run=RunDir("."),
    sweep=SweepDir(dir=".", subdir="${gpipe_job:${hydra.overrides.task}}"),
    output_subdir=None,
    job=JobConf(name="gpipe", chdir=False),
)
"""Hydra as launcher and sweeper: it makes no directories of its own, stays in the folder and logs nothing."""

STOP = "stop"
"""The file that asks the jobs to stop."""
MAX_JOB_NAME = 60
POLL_SECONDS = 0.1
PROCESS = socket.gethostname(), os.getpid()


def ask_hydra(request: Request) -> None:
    """gpipe <command> --cfg hydra|all, --info or --hydra-help: Hydra's own answers."""
    given = {"--info": request.info, "--cfg": request.cfg, "--package": request.package}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    flags += ["--resolve"] * request.resolve + ["--hydra-help"] * request.hydra_help
    with prepared(request, HYDRA) as (primary, words, _, _):
        _hydra_main(request.command, lambda _: None, [*flags, *words, *_hydra_words(request)], primary)


def run_with_hydra(request: Request, job: Job) -> Summary:
    """Run the only job of a command line with keys of Hydra."""
    add_current_folder(getattr(job.settings, "allow", ()))  # hydra.job.chdir changes it
    done: Future[Summary] = Future()

    def task(_: object) -> None:
        by_hydra = request.command == "train" and sets_key(request.words, "hydra.run.dir")
        try:
            run_dir = HydraConfig.get().runtime.output_dir
            done.set_result(run_job(job.with_values(run_dir=run_dir) if by_hydra else job))
        except BaseException as error:  # noqa: BLE001 - Hydra would print it in its own words
            done.set_exception(error)

    _store(job)
    _hydra_main(request.command, task, _hydra_words(request))
    return done.result()


def run_sweep(request: Request, began: float) -> int:
    """Run every job that has not finished, and return the first exit code that is not 0.

    began: when the command did, by the monotonic clock.
    """
    line = shlex.join(["gpipe", request.command, *request.typed])
    sweep = _judged(request)
    sweep.check()
    with _opened(sweep, line) if sweep.makes_runs else temporary_folder("sweep") as path:
        results, stop, error = _run_jobs(sweep, path, time.time() - (time.monotonic() - began))
    jobs = max(sweep.jobs, len(results))
    if request.json:
        print_sweep_json(results, sweep.monitor)
    elif results:
        print_sweep(results, sweep.monitor, jobs, line)
    finished = sum(result.exit_code == 0 for result in results)
    if stop is not None and finished < jobs:
        resume = f"; resume with: {line}" if sweep.makes_runs else ""
        raise stop.error(f"stopped by {stop}; {finished} of {jobs} jobs have finished{resume}")
    code = next((result.exit_code for result in results if result.exit_code), 0)
    if error is not None and not code:
        raise error
    if error is not None:
        print_status(f"the sweeper ended with: {describe(error.__cause__ or error)}")
    if sweep.makes_runs and results and all(result.finished_earlier for result in results):
        print_status(f"all jobs have finished; give {SWEEP_DIR}=<new directory> to run them again")
    return code


def _run_jobs(
    sweep: _Sweep, path: Path, began: float
) -> tuple[list[JobResult], StopRequested | None, BaseException | None]:
    """The results, the request to stop if there was one, and what the sweeper raised. path: of the sweep."""
    folder = path.absolute() / RESULTS
    shutil.rmtree(folder, ignore_errors=True)  # an earlier launch left it
    folder.mkdir()
    words = [each[0] for each in sweep.words.values() if len(each) == 1]
    shared = replace(sweep.request, words=without_keys(words, DIRECTORY_KEYS if sweep.makes_runs else ()))
    keys = {override_key(word): word.partition("=")[0] for word in sweep.swept}
    task = Task(shared, keys, folder, sweep.makes_runs, began)
    error: BaseException | None = None
    with sharing_stops(folder, block="submitit" in sweep.node.launcher._target_) as inbox:
        try:
            _hydra_main(shared.command, task, ["--multirun", *sweep.hydra_words(path)])
        except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - the results come first
            error = raised
    read = (RunReader(folder).json(file.name) for file in folder.glob("*.json"))
    results = sorted((JobResult(**row) for row in read), key=lambda result: result.job)
    # "stopped by SIGTERM; saved in ..."
    reasons = [str(result.error).split()[2].rstrip(",;") for result in results if result.stopped]
    return results, StopRequests(inbox).request or next(map(StopRequested, reasons), None), error


@final
@dataclass(frozen=True)
class _Sweep:
    """What is known before the first job: the words, and what they and Hydra's keys mean."""

    request: Request
    words: Mapping[str, Sequence[str]]
    """Each word of the jobs, with those that it stands for."""
    configs: Sequence[Job]
    """The configurations of jobs that together have each value at least once."""
    node: DictConfig
    """Hydra's configuration of itself."""
    monitor: str | None
    """The metric that decides; None if the jobs do not train."""
    makes_runs: bool
    """Whether the jobs are new runs, which need directories, rather than runs that are trained longer."""

    @property
    def swept(self) -> list[str]:
        return [word for word, each in self.words.items() if len(each) > 1]

    @property
    def is_optuna(self) -> bool:
        return "optuna" in self.node.sweeper._target_

    @property
    def jobs(self) -> int:
        """How many, as far as the words say it."""
        return int(self.node.sweeper.get("n_trials") or math.prod(map(len, self.words.values())))

    @property
    def digest(self) -> str:
        """A fingerprint of what the jobs compute: who launches them and how many trials there are is no part of it."""
        words = without_keys(self.request.words, (*DIRECTORY_KEYS, "hydra.sweeper.n_trials"))
        kept = [word for word in words if not sets_hydra(word) or override_key(word).startswith(SWEEPER)]
        trees: Any = [OmegaConf.to_container(config.tree) for config in self.configs]
        jobs = [{**tree, **dict.fromkeys(DIRECTORY_KEYS)} for tree in trees]
        content = json.dumps([self.request.command, sorted(kept), jobs], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def check(self) -> None:
        """Refuse what the sweeper or the launcher cannot do, before anything is written."""
        words, launcher = self.request.words, self.node.launcher
        if is_rank():
            raise ConfigError("-m: a sweep starts its runs itself; run it without torchrun")
        if sets_key(self.swept, "run_dir"):
            raise ConfigError("run_dir: a sweep has one directory, with a folder for each job; give one name")
        if sets_key(words, "run_dir") and sets_key(words, SWEEP_DIR):
            raise ConfigError(f"run_dir and {SWEEP_DIR} exclude each other; give one of them")
        if sets_key(words, SWEEP_DIR) and not self.makes_runs:
            raise ConfigError(f"{SWEEP_DIR}: has no effect, because nothing is trained; remove it")
        if sets_key(words, "hydra.sweep.subdir"):
            raise ConfigError("hydra.sweep.subdir: jobs are named after their values; remove it")
        if self.is_optuna and (self.monitor is None or self.configs[0].settings.eval.every is None):
            raise ConfigError(
                "hydra/sweeper=optuna: needs a metric of gpipe train, with evaluations; remove it"
            )
        together = launcher.get("n_jobs", 1) != 1 or "LocalLauncher" in launcher._target_
        asked = not self.is_optuna or sets_key(words, "hydra.sweeper.n_jobs")
        if together and asked and self.jobs != 1 and self.monitor is not None:
            _check_devices(self.configs)

    def hydra_words(self, path: Path) -> list[str]:
        """The words for Hydra; path: of the sweep."""
        # Struct mode would refuse keys that the first combination does not have.
        swept = [f"++{quote_override(word).lstrip('+')}" for word in self.swept]
        defaults = self._optuna_words() if self.is_optuna else []
        directory = f"{SWEEP_DIR}={quoted(str(path.absolute()))}"
        return [*swept, *defaults, *_hydra_words(self.request), directory]

    def _optuna_words(self) -> list[str]:
        """Defaults, listed in docs/coming-from/hydra.md; Optuna speaks of study and failed jobs only if told to."""
        logs = ("hydra/hydra_logging", "hydra/job_logging")
        if not any(override_key(word).startswith(logs) for word in self.request.words):
            importlib.import_module("optuna.logging").set_verbosity(logging.ERROR)
            logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)
        settings: Any = self.configs[0].settings
        better = "minimize" if lower_is_better(str(self.monitor)) else "maximize"
        study = f"gpipe-{self.digest[:8]}"
        values = {"direction": better, "study_name": study, "n_jobs": 1, "max_failure_rate": 1.0}
        # The same seed asks for the same trials again: it resumes a sweep, and would repeat those of a storage.
        if "seed" in self.node.sweeper.sampler and self.node.sweeper.storage is None:
            values["sampler.seed"] = settings.seed
        return [f"hydra.sweeper.{key}={value}" for key, value in values.items()]


def _judged(request: Request) -> _Sweep:
    """Compose and check the jobs of a sweep, as far as they are known before the first one runs."""
    words, hydra_words = sweep_words(request), _hydra_words(request)
    values = list(words.values())
    jobs = list(product(*values)) if math.prod(map(len, values)) <= MAX_JUDGED else _each_value(values)
    with stop_immediately():
        configs = [compose(replace(request, words=(*job, *hydra_words))) for job in jobs]
        for config in configs:
            check_files(config.settings)
        _store(configs[0])
        with config_errors(request.command), initialize(None, request.command, **VERSION):
            node = hydra.compose(PRIMARY, hydra_words, return_hydra_config=True).hydra
    settings = configs[0].settings
    if request.dry_run or not isinstance(settings, TrainConfig):
        return _Sweep(request, words, configs, node, None, makes_runs=False)
    monitor = settings.snapshot.monitor or "loss"
    return _Sweep(request, words, configs, node, monitor, makes_runs=settings.resume in (None, "auto"))


def _each_value(values: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Jobs that together have each value, with the first values of the other keys."""
    first = [each[0] for each in values]
    places = [(place, value) for place, each in enumerate(values) for value in each]
    return [(*first[:place], value, *first[place + 1 :]) for place, value in places]


def _check_devices(configs: Sequence[Job]) -> None:
    """Refuse jobs at the same time on one accelerator: they would run out of its memory, or slow each other down."""
    from gpipe_cli.accelerator.devices import available_devices  # imports torch

    settings: list[Any] = [config.settings for config in configs]
    jobs = [
        set(available_devices(each.devices)) for each in (settings if len(settings) > 1 else settings * 2)
    ]
    used = [device for devices in jobs for device in devices if device.type != "cpu"]
    if shared := next((device for device in used if used.count(device) > 1), None):
        raise ConfigError(
            f"hydra/launcher: several jobs at once would train on {shared}; give hydra.launcher.n_jobs=1 to "
            "hydra/launcher=joblib, or each job devices of its own"
        )


@contextmanager
def _opened(sweep: _Sweep, line: str) -> Iterator[Path]:
    """Create the directory of a sweep, or find that of an earlier launch; inside, no other process writes to it."""
    digest, first = sweep.digest, sweep.configs[0]
    by_hydra = sets_key(sweep.request.words, SWEEP_DIR)
    given = str(sweep.node.sweep.dir) if by_hydra else getattr(first.settings, "run_dir", None)
    path = None if given is None else Path(given)
    if given is None:  # the newest directory with this sweep
        paths = sorted((path.parent for path in SWEEPS.glob(f"*/*/{SWEEP}")), key=lambda path: path.name)
        same = (path for path in reversed(paths) if RunReader(path).json(SWEEP).get("digest") == digest)
        path = next(same, None)
    if path is None or not (path / SWEEP).exists():
        path = make_run_directory(given, SWEEPS.name, first.model)
    with lock_run_directory(path, LOCK):
        is_new = not (path / SWEEP).exists()
        if is_new:
            write_json(path / SWEEP, {"digest": digest, "command": line})
        earlier = RunReader(path).json(SWEEP)
        if earlier.get("digest") != digest:
            command = earlier.get("command", f"(no line, because {SWEEP} cannot be read)")
            raise ConfigError(
                f"{path}: has another sweep, which repeats with: {command}; choose another directory"
            )
        print_status(f"{'sweep directory:' if is_new else 'resuming the sweep in'} {path}")
        yield path


def _store(config: Job) -> None:
    """Give Hydra the configuration of a job as plain keys: in its own, `${batch_size}` may refer to them."""
    store(PRIMARY, OmegaConf.create(OmegaConf.to_container(config.tree)))
    store("config", HYDRA, group="hydra")


def _hydra_words(request: Request) -> list[str]:
    return [quote_override(word) for word in request.words if sets_hydra(word)]


def _hydra_main(
    command: str, task: Callable[[Any], Any], words: Sequence[str], primary: str = PRIMARY
) -> None:
    """Run the task by Hydra, which reads its words from sys.argv."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that it raises instead of printing a traceback
    before, sys.argv = sys.argv, [f"gpipe {command}", *words]
    try:
        with config_errors(command), suppress(SystemExit):  # it exits after its help
            hydra.main(config_path=None, config_name=primary, **VERSION)(task)()
    finally:
        sys.argv = before


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
            if self.request.debug:
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
        with folder:
            summary = run_job(replace(config, began=began, in_sweep=True))
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
    return f"{readable[:MAX_JOB_NAME]}-{digest[:8]}"


# Where launchers unpickle a Task, they import this module first, and then resolve the name of the directory.
register_resolver("gpipe_job", job_name)
