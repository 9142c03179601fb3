"""The command line: runs a command with its configuration, and turns an error into one line and an exit code.

Command modules are imported when they are called, so that help, completion and error messages stay quick.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn

from gpipe_cli import __version__
from gpipe_cli.activity import activity
from gpipe_cli.arguments import parse
from gpipe_cli.completion import complete
from gpipe_cli.config.schema import SCHEMAS, SWEPT
from gpipe_cli.config.words import Request, override_key, sets_hydra
from gpipe_cli.errors import ConfigError, GpipeError, PeerError, Stopped, exit_code, is_long_name, or_list
from gpipe_cli.help import COMMANDS, command_help, overview
from gpipe_cli.launch.rank import is_main_process, leave_exit_code, leave_reason
from gpipe_cli.process_lifetime import remove_abandoned_folders
from gpipe_cli.report.formatting import describe
from gpipe_cli.report.output import discard_stdout, print_status
from gpipe_cli.runs.directory import recorded_attempt, resumed_directory
from gpipe_cli.safe_files import redacted
from gpipe_cli.training.signals import as_stopped, ignore_signals, leave_immediately, stop_immediately

HELP = ("--help", "-h", "help")
COMPLETION = ("-sc", "--shell-completion")
RUNS_NOTHING = ("--help", "-h", "--version", "-V", "--dry-run", "--cfg", "-c", "--info", "-i", "--hydra-help")


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not is_main_process():
        discard_stdout()
    debug, attempt = "--debug" in arguments, ExitStack()

    def leave(stop: BaseException) -> NoReturn:
        attempt.__exit__(type(stop), stop, None)
        os._exit(_fail(stop, debug=debug))

    try:
        with attempt:
            attempt.enter_context(_recorded(arguments))
            return _dispatch(arguments, leave)
    except BaseException as error:  # noqa: BLE001 - the outermost handler: a layer may raise anything
        return _fail(error, debug=debug)


def _recorded(arguments: list[str]) -> AbstractContextManager[None]:
    """Inside, an error of a command line that resumes a run is recorded in the run, whatever else it gets wrong."""
    flags = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    keys = {override_key(word) for word in arguments}
    if arguments[:1] != ["train"] or not keys.intersection(("resume", "config")) or not is_main_process():
        return nullcontext()
    if flags.intersection((*RUNS_NOTHING, "-m", "--multirun")):  # a job of a sweep records its own end
        return nullcontext()
    from gpipe_cli.config.compose import compose

    # The keys that name the run, in the file of keys too unless that is a mistake, and no other key.
    for kept in (("run_dir", "resume", "config"), ("run_dir", "resume")):
        words = tuple(word for word in arguments if override_key(word) in kept)
        with suppress(GpipeError, OSError, ValueError):
            settings: Any = compose(Request("train", words)).settings
            run = resumed_directory(settings.resume, settings.run_dir)
            return recorded_attempt(run) if run and (run / "config.yaml").is_file() else nullcontext()
    return nullcontext()


def _dispatch(arguments: list[str], leave: Callable[[BaseException], NoReturn]) -> int:
    command, *rest = arguments or ["--help"]
    if command in COMPLETION:
        complete(rest)
        return 0
    if command in HELP and not rest:
        return _say(overview())
    if command in HELP:
        command, rest = rest[0], ["--help", *rest[1:]]
    if command in ("--version", "-V"):
        return _say(f"gpipe {__version__}")
    if command not in COMMANDS:
        raise ConfigError(f"unknown command '{command}'; {or_list(command, COMMANDS)}")
    request = parse(rest, command)
    if request.version:
        return _say(f"gpipe {__version__}")
    if request.help:
        return _say(command_help(command, request))
    if command in SCHEMAS:
        return _configured(request, leave)
    module = importlib.import_module(f"gpipe_cli.commands.{command}")
    with stop_immediately():
        module.run(request)
    return 0


def _configured(request: Request, leave: Callable[[BaseException], NoReturn]) -> int:
    """Compose and check the configuration, then print it, or run it, once or as a sweep."""
    activity.now("reading the configuration")
    from gpipe_cli.config.checks import check_files
    from gpipe_cli.config.compose import compose, print_config
    from gpipe_cli.jobs import import_torch, run_job
    from gpipe_cli.sweep import ask_hydra, run_sweep, run_with_hydra

    remove_abandoned_folders()
    if request.cfg == "job":
        print_config(request)
        return 0
    if request.cfg or request.info or request.hydra_help:
        ask_hydra(request)
        return 0
    began = _job_start()
    if request.multirun or "hydra.mode=MULTIRUN" in request.words:
        return run_sweep(request, began)
    with stop_immediately():
        job = replace(compose(request), began=began)
        if request.command != "launch-script":  # the machines of the script have files of their own
            check_files(job.settings)
    with leave_immediately(leave):
        import_torch(request.command)
    by_hydra = request.command in SWEPT and any(map(sets_hydra, request.words))
    summary = run_with_hydra(request, job) if by_hydra else run_job(job)
    if request.json:
        sys.stdout.write(f"{json.dumps(summary)}\n")
    return 0


def _job_start() -> float:
    """The monotonic time at which the job of a launch script began; now if no launch script started this."""
    start = os.environ.get("GPIPE_JOB_START")  # in seconds since 1970
    return time.monotonic() - (max(0.0, time.time() - float(start)) if start else 0.0)


def _say(text: str) -> int:
    sys.stdout.write(f"{text}\n")
    return 0


def _fail(error: BaseException, *, debug: bool) -> int:
    activity.end()
    ignore_signals()
    error = as_stopped(error)
    if debug:
        import traceback

        traceback.print_exception(error)
    if is_long_name(error) and not hasattr(error, "__notes__"):  # those of a layer's error say its place
        name = getattr(error, "filename", "")
        error = ConfigError(f"{name}: the name is too long for a file; give a shorter one")
    if isinstance(error, KeyboardInterrupt):
        line = "stopped by Ctrl-C"
    elif isinstance(error, Stopped):
        line = describe(error)
    else:
        hint = "" if debug or isinstance(error, GpipeError) else "; --debug shows the traceback"
        line = f"error: {describe(error)}{hint}"
    leave_exit_code(error)
    leave_reason(redacted(f"gpipe: {line}"), of_another=isinstance(error, PeerError))
    if is_main_process():
        print_status(f"gpipe: {line}")
    return exit_code(error)
