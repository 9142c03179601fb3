"""The command line: a command word, then Hydra's business; an error of ours becomes one line and an exit code.

Commands are named as text and imported when called, so that help, completion and a mistyped word stay quick.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from gpipe_cli.arguments import Invocation, parse
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError, GpipeError
from gpipe_cli.help import COMMANDS, command_help, overview
from gpipe_cli.report.failure import describe, exit_code
from gpipe_cli.version import VERSION

COMPLETION = ("-sc", "--shell-completion")


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit code is returned."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read our output has gone (`gpipe ls | head`): that is no error, and Python must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:  # noqa: BLE001 - the last place: whatever a layer raised ends as one line
        return _fail(error, debug="--debug" in arguments)


def _dispatch(arguments: list[str]) -> int:
    command, *rest = arguments or ["--help"]
    if command in COMPLETION:
        return _complete(rest)
    if command in ("--help", "-h", "help"):
        return _say(command_help(rest[0]) if rest and rest[0] in COMMANDS else overview())
    if command in ("--version", "-V"):
        return _say(f"gpipe {VERSION}")
    if command not in COMMANDS:
        raise ConfigError(f"unknown command '{command}'; {or_list(command, COMMANDS)}")
    invocation = parse(rest)
    if invocation.version:
        return _say(f"gpipe {VERSION}")
    if invocation.help:
        return _say(command_help(command))
    if COMMANDS[command].configured:
        return _configured(command, invocation)
    importlib.import_module(f"gpipe_cli.commands.{command}").run(invocation)
    return 0


def _configured(command: str, invocation: Invocation) -> int:
    """Check the configuration, then let Hydra compose and run it, once or as a sweep."""
    from gpipe_cli.commands.jobs import Jobs
    from gpipe_cli.config.load import Request, compose_all, register

    register()
    flags = dict(zip(invocation.hydra, invocation.hydra[1:], strict=False))
    request = Request(
        command,
        invocation.words,
        config_name=flags.get("--config-name", flags.get("-cn")),
        config_dir=flags.get("--config-dir", flags.get("-cd")),
    )
    multirun = invocation.multirun
    overrides = compose_all(request, complete=not invocation.prints_config, multirun=multirun)
    jobs = Jobs(command, invocation, overrides)
    if multirun:  # Hydra insists on a folder for its own notes on a sweep: it gets one that nobody sees
        notes = tempfile.mkdtemp(prefix="gpipe-sweep-")
        try:
            _run_hydra(command, invocation.hydra, [*overrides, f"hydra.sweep.dir={notes}"], jobs.task)
        finally:
            shutil.rmtree(notes)
    else:
        runs = not invocation.prints_config
        _run_hydra(command, invocation.hydra, overrides, jobs.task, task_runs=runs)
    return jobs.finish()


def _run_hydra(
    command: str,
    flags: Sequence[str],
    overrides: Sequence[str],
    task: Callable[..., Any],
    *,
    task_runs: bool = True,
) -> None:
    import hydra

    from gpipe_cli.config.locate import conf_dir

    if not task_runs:
        # Hydra prints and nothing else happens: if the reader goes (`| head`), so do we, without a word.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.argv = ["gpipe", *flags, *overrides]
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(task)()


def _complete(rest: list[str]) -> int:
    """Tab completion: the first word is ours, what follows is Hydra's for that command."""
    line = os.environ.get("COMP_LINE", "")
    words = line.split()
    answering = any(word.startswith("query=") for word in rest)
    command = words[1] if len(words) > 1 else ""
    typing_command = len(words) < 2 or (len(words) == 2 and not line.endswith(" "))
    if answering and (typing_command or command not in COMMANDS):
        return _say(
            "\n".join(name for name in (*COMMANDS, "--help", "--version") if name.startswith(command))
        )
    configured = command if command in COMMANDS and COMMANDS[command].configured else "train"
    if answering:
        before = line.index(command) if command else len(line)
        os.environ["COMP_LINE"] = line[:before] + line[before + len(command) :].lstrip()
        os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    from gpipe_cli.config.load import register

    register()
    _run_hydra(configured, ("-sc",), rest, _no_task, task_runs=False)
    return 0


def _no_task(config: object) -> NoReturn:
    raise AssertionError("completion runs no job")


def _say(text: str) -> int:
    _print(text, sys.stdout)
    return 0


def _fail(error: BaseException, *, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        line = "stopped by Ctrl-C"
    else:
        hint = "" if debug or isinstance(error, GpipeError) else "; --debug shows the traceback"
        line = f"error: {describe(error)}{hint}"
    _print(f"gpipe: {line}", sys.stderr)
    return exit_code(error)


def _print(text: str, stream: TextIO) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def script() -> NoReturn:
    """The console script."""
    sys.exit(main())
