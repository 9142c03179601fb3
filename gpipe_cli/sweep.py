"""A sweep, or a job with keys of Hydra: Hydra's sweeper and launcher run it, and each job is composed as one alone is.

Hydra gets the words that differ between the jobs, and those that configure it. A job composes its own words, so that
the same words mean the same in a sweep and alone. A failure does not end a sweep; a request to stop does. A sweep of
training runs has a directory, so that the same line finds its jobs again: it skips those that have finished and
resumes the others.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, final

import hydra
from hydra import initialize
from hydra.conf import HydraConf, JobConf, RunDir, SweepDir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import JobConfig, Request, SweepWord, compose, prepared, sweep_words
from gpipe_cli.config.messages import config_errors
from gpipe_cli.config.schema import ModelConfig, TrainConfig
from gpipe_cli.config.sources import VERSION, store
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import override_key, quote_override, quoted, sets_hydra, sets_key, without_keys
from gpipe_cli.errors import INTERRUPTED, ConfigError, Interrupted, Stopped
from gpipe_cli.jobs import run_job
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.run_files import RunFiles
from gpipe_cli.report.sweep_results import JobResult, print_sweep, print_sweep_json
from gpipe_cli.run.job import Summary
from gpipe_cli.run.sweep_directory import open_sweep, results_folder
from gpipe_cli.sweep_job import SweepStopped, Task, passing_signals_on, requested_stop
from gpipe_cli.torch_internals import torchrun
from gpipe_cli.training.run_directory import check_directory_name
from gpipe_cli.training.signals import stop_immediately
from gpipe_cli.values import lower_is_better

PRIMARY = "gpipe_job"
DIRECTORY_KEYS = ("run_dir", "resume")
"""Keys that say where a sweep is, and are no part of what it computes."""
SWEEP_DIR = "hydra.sweep.dir"
MOST_JUDGED = 100
"""Combinations to compose before the first job. Of more, each value is composed with the first ones of other keys."""


def ask_hydra(request: Request, invocation: Invocation) -> None:
    """gpipe <command> --cfg hydra|all, --info or --hydra-help: Hydra's own answers."""
    flags = ["--hydra-help"] if invocation.hydra_help else []
    flags += [] if invocation.info is None else ["--info", invocation.info]
    flags += [] if invocation.cfg is None else ["--cfg", invocation.cfg]
    flags += ["--resolve"] if invocation.resolve else []
    flags += [] if invocation.package is None else ["--package", invocation.package]
    config = _hydra_config({"help": "default"}, {"hydra_help": "default"})
    with prepared(request, config) as (primary, words, _, _):
        _hydra_main(request.command, primary, _nothing, [*flags, *words, *_hydra_words(request)])


def run_with_hydra(request: Request, invocation: Invocation, began: float) -> int:
    """Run a sweep, or the only job of a command line with keys of Hydra; began: when, by the monotonic clock."""
    if invocation.multirun or "hydra.mode=MULTIRUN" in request.words:
        return _run_sweep(request, invocation, began)
    config = compose(request)
    add_current_folder(getattr(config.settings, "allow", ()))  # hydra.job.chdir changes it
    results: list[Summary | BaseException] = []

    def task(_: object) -> None:
        try:
            own = config
            if request.command == "train" and sets_key(request.words, "hydra.run.dir"):
                own = config.with_values(run_dir=HydraConfig.get().runtime.output_dir)
            results.append(
                run_job(request, own, json=invocation.json, dry_run=invocation.dry_run, began=began)
            )
        except BaseException as error:  # noqa: BLE001 - Hydra would print it in its own words
            results.append(error)

    _store(config)
    _hydra_main(request.command, PRIMARY, task, _hydra_words(request))
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    if invocation.json:
        sys.stdout.write(f"{json.dumps(result)}\n")
    return 0


def _run_sweep(request: Request, invocation: Invocation, began: float) -> int:
    """Run every job that has not finished, and return the first exit code that is not 0."""
    line = shlex.join(["gpipe", request.command, *invocation.typed])
    sweep = _judged(request, dry_run=invocation.dry_run)
    with sweep.opened(line) as path, results_folder(None if torchrun.follows() else path) as folder:
        task = Task(
            replace(request, words=sweep.shared),
            tuple(word.given for word in sweep.swept),
            folder,
            path is not None,
            invocation,
            began=time.time() - (time.monotonic() - began),
        )
        words = ["--multirun", *sweep.hydra_words(path or folder)]
        error: BaseException | None = None
        try:
            with passing_signals_on(folder, block="submitit" in sweep.launcher):
                _hydra_main(request.command, PRIMARY, task, words)
        except (Exception, KeyboardInterrupt, SweepStopped) as raised:  # noqa: BLE001 - the results come first
            error = raised
        files = RunFiles(folder)
        read = [files.json(file.name) for file in folder.glob("[0-9]*.json")]
        stop = requested_stop(folder)
    results = sorted((JobResult(**result) for result in read if result), key=lambda result: result.number)
    jobs = sweep.jobs or len(results)
    if invocation.json:
        print_sweep_json(results, sweep.monitor)
    else:
        print_sweep(results, sweep.monitor, jobs, line)
    finished = sum(result.exit_code == 0 for result in results)
    if isinstance(error, KeyboardInterrupt):
        stop = INTERRUPTED, "stopped by Ctrl-C at once"
    if stop is not None and finished < jobs:
        kind = Interrupted if stop[0] == INTERRUPTED else Stopped
        resume = f"; resume with: {line}" if path is not None else ""
        raise kind(f"{stop[1]}; {finished} of {jobs} jobs have finished{resume}")
    code = next((result.exit_code for result in results if result.exit_code), 0)
    if error is not None:
        if not code:
            raise error
        print_status(f"the sweeper ended with: {describe(error.__cause__ or error)}")
    if path is not None and results and all(result.finished_earlier for result in results):
        print_status(f"all jobs have finished; give {SWEEP_DIR}=<new directory> to run them again")
    return code


@final
@dataclass(frozen=True)
class _Sweep:
    """What is known before the first job: the words, and what they and Hydra's keys mean."""

    request: Request
    words: Sequence[SweepWord]
    configs: Sequence[JobConfig]
    """Of jobs that together have each value at least once."""
    node: DictConfig
    """Hydra's configuration of itself."""
    dry_run: bool

    @property
    def swept(self) -> list[SweepWord]:
        return [word for word in self.words if len(word.each) > 1]

    @property
    def shared(self) -> tuple[str, ...]:
        """The words of all jobs, without those that say where the sweep is."""
        words = tuple(word.each[0] for word in self.words if len(word.each) == 1)
        return without_keys(words, DIRECTORY_KEYS) if self.makes_runs else words

    @property
    def launcher(self) -> str:
        return str(self.node.launcher._target_)

    @property
    def sweeper(self) -> str:
        return str(self.node.sweeper._target_)

    @property
    def is_optuna(self) -> bool:
        return "optuna" in self.sweeper

    @property
    def jobs(self) -> int | None:
        """How many, if the sweeper is known to run all combinations or a given number."""
        if self.is_optuna:
            return int(self.node.sweeper.n_trials)
        is_grid = "BasicSweeper" in self.sweeper and not self.node.sweeper.params
        return math.prod(len(word.each) for word in self.words) if is_grid else None

    @property
    def monitor(self) -> str | None:
        """The metric that decides; none if the jobs do not train."""
        settings = self.configs[0].settings
        if self.dry_run or not isinstance(settings, TrainConfig):
            return None
        return settings.snapshot.monitor or "loss"

    @property
    def given_directory(self) -> str | None:
        if sets_key(self.request.words, SWEEP_DIR):
            return str(self.node.sweep.dir)
        return getattr(self.configs[0].settings, "run_dir", None)

    @property
    def makes_runs(self) -> bool:
        """Whether the jobs are new runs, which need directories, rather than runs that are trained longer."""
        resume = getattr(self.configs[0].settings, "resume", None)
        agreed = not torchrun.is_rank() or self.given_directory is not None
        return self.monitor is not None and resume in (None, "auto") and agreed

    @property
    def digest(self) -> str:
        """A fingerprint of what the jobs compute: who launches them and how many trials there are is no part of it."""
        words = [
            word
            for word in without_keys(self.request.words, (*DIRECTORY_KEYS, "hydra.sweeper.n_trials"))
            if not sets_hydra(word) or override_key(word).startswith(("hydra.sweeper", "hydra/sweeper"))
        ]
        trees: Any = [OmegaConf.to_container(config.tree) for config in self.configs]
        kept = [{**tree, **dict.fromkeys(DIRECTORY_KEYS)} for tree in trees]
        content = json.dumps([self.request.command, sorted(words), kept], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def check(self) -> None:
        """Refuse what the sweeper or the launcher cannot do, before anything is written."""
        for word in self.words:
            if word.is_interval and "BasicSweeper" in self.sweeper:
                raise ConfigError(
                    f"{word.given}: an interval needs hydra/sweeper=optuna, which searches in it"
                )
            if override_key(word.given) == "run_dir" and len(word.each) > 1:
                raise ConfigError(f"{word.given}: a sweep has one directory, with a folder for each job")
        if sets_key(self.request.words, "run_dir") and sets_key(self.request.words, SWEEP_DIR):
            raise ConfigError(f"run_dir and {SWEEP_DIR} exclude each other; give one of them")
        if self.is_optuna and self.monitor is None:
            raise ConfigError(
                "hydra/sweeper=optuna: needs a metric, which only gpipe train has; leave it out"
            )
        check_directory_name(self.given_directory)
        if sets_key(self.request.words, SWEEP_DIR) and not self.makes_runs:
            raise ConfigError(
                f"{SWEEP_DIR}: has no effect, because only new runs have directories; leave it out"
            )
        together = self.node.launcher.get("n_jobs", 1) != 1 or "LocalLauncher" in self.launcher
        asked = not self.is_optuna or sets_key(self.request.words, "hydra.sweeper.n_jobs")
        if together and asked and self.jobs != 1 and self.monitor is not None:
            _check_devices(self.configs)

    def hydra_words(self, path: Path) -> list[str]:
        """The words for Hydra; path: of the sweep."""
        defaults: list[str] = []
        if self.is_optuna:
            settings: Any = self.configs[0].settings
            better = "minimize" if lower_is_better(self.monitor or "loss") else "maximize"
            study = f"gpipe-{self.digest[:8]}"
            values = {"direction": better, "study_name": study, "n_jobs": 1, "max_failure_rate": 1.0}
            # The same seed asks for the same trials again: it resumes a sweep, and would repeat those of a storage.
            if "seed" in self.node.sweeper.sampler and self.node.sweeper.storage is None:
                values["sampler.seed"] = settings.seed
            defaults = [f"hydra.sweeper.{key}={value}" for key, value in values.items()]
            _silence_optuna(self.request.words)
        # Struct mode would refuse keys that the first combination does not have.
        swept = [f"++{quote_override(word.given).lstrip('+')}" for word in self.swept]
        directory = f"{SWEEP_DIR}={quoted(str(path.absolute()))}"
        return [*swept, *defaults, *_hydra_words(self.request), directory]

    def opened(self, line: str) -> AbstractContextManager[Path | None]:
        """Its directory, if it has one; of the ranks of torchrun, the first one creates it."""
        if not self.makes_runs:
            return nullcontext()
        if torchrun.follows():
            return nullcontext(Path(str(self.given_directory)))
        return open_sweep(self.given_directory, self.digest, line, self.configs[0].model)


def _judged(request: Request, *, dry_run: bool) -> _Sweep:
    """Compose and check the jobs of a sweep, as far as they are known before the first one runs."""
    words = sweep_words([word for word in request.words if not sets_hydra(word)], request.command)
    hydra_words = _hydra_words(request)
    values = [word.each for word in words]
    first = tuple(each[0] for each in values)
    if math.prod(map(len, values)) <= MOST_JUDGED:
        jobs = list(product(*values))
    else:
        others = (
            (*first[:position], value, *first[position + 1 :])
            for position, each in enumerate(values)
            for value in each[1:]
        )
        jobs = [first, *others]
    with stop_immediately():
        configs = [compose(replace(request, words=(*job, *hydra_words))) for job in jobs]
        _store(configs[0])
        with config_errors(request.command), initialize(None, request.command, **VERSION):
            tree = hydra.compose(PRIMARY, hydra_words, return_hydra_config=True)
    sweep = _Sweep(request, words, configs, tree.hydra, dry_run)
    sweep.check()
    return sweep


def _check_devices(configs: Sequence[JobConfig]) -> None:
    """Refuse jobs at the same time on one accelerator: they would run out of its memory, or slow each other down."""
    from gpipe_cli.accelerator.devices import available_devices  # imports torch

    devices = [
        available_devices(config.settings.devices)
        for config in (*configs, *configs[: len(configs) == 1])
        if isinstance(config.settings, ModelConfig)
    ]
    used = [device for own in devices for device in set(own) if device.type != "cpu"]
    if shared := next((device for device in used if used.count(device) > 1), None):
        raise ConfigError(
            f"hydra/launcher: several jobs at once would train on {shared}; give hydra.launcher.n_jobs=1 to "
            "hydra/launcher=joblib, or each job devices of its own"
        )


def _silence_optuna(words: Sequence[str]) -> None:
    """Optuna announces its study and each failed job, unless the user has chosen what to log."""
    if not any(override_key(word).startswith(("hydra/hydra_logging", "hydra/job_logging")) for word in words):
        importlib.import_module("optuna.logging").set_verbosity(logging.ERROR)
        logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.ERROR)


def _hydra_config(*more: dict[str, Any]) -> HydraConf:
    """Hydra as launcher and sweeper: it makes no directories of its own, stays in the folder and logs nothing."""
    logs = [{"hydra_logging": "none"}, {"job_logging": "none"}]
    return HydraConf(
        defaults=[{"launcher": "basic"}, {"sweeper": "basic"}, *logs, {"callbacks": None}, *more],
        run=RunDir("."),
        sweep=SweepDir(dir=".", subdir="${gpipe_job:${hydra.overrides.task}}"),
        output_subdir=None,
        job=JobConf(name="gpipe", chdir=False),
    )


def _store(config: JobConfig) -> None:
    """Give Hydra the configuration of a job as plain keys: in its own, `${batch_size}` may refer to them."""
    store(PRIMARY, OmegaConf.create(OmegaConf.to_container(config.tree)))
    store("config", _hydra_config(), group="hydra")


def _hydra_words(request: Request) -> list[str]:
    return [quote_override(word) for word in request.words if sets_hydra(word)]


def _nothing(config: Any) -> None:
    raise AssertionError("Hydra prints, and runs nothing")


def _hydra_main(command: str, primary: str, task: Callable[[Any], Any], words: Sequence[str]) -> None:
    # Hydra exits after its help.
    with config_errors(command), _arguments([f"gpipe {command}", *words]), suppress(SystemExit):
        hydra.main(config_path=None, config_name=primary, **VERSION)(task)()


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """Hydra reads its words from sys.argv, and raises instead of printing a traceback if this variable is set."""
    argv, variable = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = words, "1"
    try:
        yield
    finally:
        sys.argv = argv
        if variable is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = variable
