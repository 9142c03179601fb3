"""The command line: a command word, then Hydra's business; an error of ours becomes one line and an exit code.

Commands are named as text and imported when called, so that help, completion and a mistyped word stay quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from gpipe_cli.arguments import FLAGS, PLAIN_FLAGS, Invocation, parse
from gpipe_cli.completion import complete
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError, GpipeError, PeerError, Stopped
from gpipe_cli.help import COMMANDS, command_help, overview
from gpipe_cli.owned_folder import owned_folder, remove_abandoned
from gpipe_cli.report.failure import describe, exit_code
from gpipe_cli.report.output import discard_stdout
from gpipe_cli.torch_internals import torchrun
from gpipe_cli.training.signals import StopNow, stop_listening, stopped_at_once
from gpipe_cli.version import VERSION

COMPLETION = ("-sc", "--shell-completion")


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit code is returned."""
    arguments = sys.argv[1:] if argv is None else argv
    if torchrun.follows():
        discard_stdout()
    try:
        return _dispatch(arguments)
    except BaseException as error:  # noqa: BLE001 - the last place: whatever a layer raised ends as one line
        stop_listening()
        return _fail(error, debug="--debug" in arguments)


def _dispatch(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in COMPLETION:
        complete(rest, _hydra_completion)
        return 0
    if command in ("--help", "-h", "help"):
        return _say(command_help(_known(rest[0])) if rest else overview())
    if command in ("--version", "-V"):
        return _say(f"gpipe {VERSION}")
    invocation = parse(rest, FLAGS if COMMANDS[_known(command)].configured else PLAIN_FLAGS)
    if invocation.version:
        return _say(f"gpipe {VERSION}")
    if invocation.help:
        return _say(command_help(command))
    if COMMANDS[command].configured:
        return _configured(command, invocation)
    module = importlib.import_module(f"gpipe_cli.commands.{command}")
    with stopped_at_once():
        module.run(invocation)
    return 0


def _known(command: str) -> str:
    if command not in COMMANDS:
        raise ConfigError(f"unknown command '{command}'; {or_list(command, COMMANDS)}")
    return command


def _configured(command: str, invocation: Invocation) -> int:
    """Check the configuration, then let Hydra compose and run it, once or as a sweep."""
    from gpipe_cli.commands.jobs import Jobs
    from gpipe_cli.config.load import Request, compose_all, register
    from gpipe_cli.config.quoting import quoted

    remove_abandoned()
    register()
    request = Request(
        command,
        tuple(map(quoted, invocation.words)),
        config_name=invocation.value("--config-name", "-cn"),
        config_dir=invocation.value("--config-dir", "-cd"),
    )
    multirun = invocation.multirun
    overrides = compose_all(request, complete=not invocation.prints_config, multirun=multirun)
    jobs = Jobs(command, invocation, overrides)
    if multirun:  # Hydra insists on a folder for its own notes on a sweep: it gets one that nobody sees
        with owned_folder("sweep") as notes:
            try:
                _run_hydra(command, invocation.hydra, [*overrides, f"hydra.sweep.dir={notes}"], jobs.task)
            except KeyboardInterrupt as error:
                jobs.finish()  # what the jobs before it found is shown
                if isinstance(error.__cause__, Stopped):
                    raise error.__cause__ from None
                raise
    else:
        _run_hydra(command, invocation.hydra, overrides, jobs.task)
    return jobs.finish()


def _run_hydra(
    command: str, flags: Sequence[str], overrides: Sequence[str], task: Callable[..., Any]
) -> None:
    import hydra

    from gpipe_cli.config.locate import conf_dir

    sys.argv = ["gpipe", *flags, *overrides]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(task)()
    except SystemExit as ended:  # Hydra's own, after it has said all: what a job raises is kept by Jobs
        if ended.code:
            raise GpipeError("Hydra gave up; its reason is above") from ended


def _hydra_completion(command: str, words: list[str]) -> None:
    from gpipe_cli.config.load import register

    register()
    _run_hydra(command, ("-sc",), words, _no_task)


def _no_task(config: object) -> NoReturn:
    raise AssertionError("completion runs no job")


def _say(text: str) -> int:
    _print(text, sys.stdout)
    return 0


def _fail(error: BaseException, *, debug: bool) -> int:
    if isinstance(error, StopNow):
        error = error.request.error(f"stopped by {error.request.reason}")
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        line = "stopped by Ctrl-C"
    elif isinstance(error, Stopped):
        line = describe(error)
    else:
        hint = "" if debug or isinstance(error, GpipeError) else "; --debug shows the traceback"
        line = f"error: {describe(error)}{hint}"
    torchrun.leave_reason(f"gpipe: {line}", of_another=isinstance(error, PeerError))
    if not torchrun.follows():
        _print(f"gpipe: {line}", sys.stderr)
    return exit_code(error)


def _print(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()
