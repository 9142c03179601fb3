"""The page of every command, flag, exit code and file name, from what `gpipe --help` and the errors are made of."""

from __future__ import annotations

from gpipe_cli import errors
from gpipe_cli.help import COMMANDS, FLAGS
from make_docs.markdown import MADE, code, table

__all__ = ["page"]

ENVIRONMENT = {
    "XDG_CACHE_HOME": "where measured times of layers are kept: `$XDG_CACHE_HOME/gpipe`, else `~/.cache/gpipe`",
    "NO_COLOR": "no colours",
    "TERM=dumb": "no live panel: plain lines",
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME": "under torchrun: the network interface that ranks talk over",
    "WANDB_MODE, MLFLOW_TRACKING_URI": "as these services define them, where their key is null",
}
ENDINGS = {
    0: "done",
    errors.GpipeError.exit_code: "an error in a layer, with partition, layer and micro-batch, or in gpipe itself",
    errors.ConfigError.exit_code: "a key, value or combination that cannot be used; nothing was begun",
    errors.DataError.exit_code: "data missing, broken, or not fitting the model",
    errors.RunError.exit_code: "a run or snapshot missing or damaged",
    errors.NumericError.exit_code: "a loss or gradient that is not finite",
    errors.ResourceError.exit_code: "memory, disk or permissions",
    errors.PeerError.exit_code: "another process failed or did not answer, or a step took longer than `step_timeout`",
    errors.Stopped.exit_code: "stopped on request (SIGTERM, SIGUSR1, SIGHUP, `time_limit`); can be resumed",
    errors.INTERRUPTED: "stopped by Ctrl-C; can be resumed",
}


def page() -> str:
    parts = [
        MADE,
        "# Commands",
        "`gpipe <command> [key=value ...] [flags]`. Results go to stdout, progress and errors to stderr.",
        table(
            ["command", "what it does"],
            [[f"[`gpipe {name}`](#gpipe-{name})", command.summary] for name, command in COMMANDS.items()],
        ),
        *(part for name in COMMANDS for part in _command(name)),
        "## Flags",
        "Of the commands that take keys; the others know `--json`, `--debug` and `--help`.",
        table(["flag", "what it does"], [[code(flag), meaning] for flag, meaning in FLAGS.items()]),
        "## Exit codes",
        "An error is one line on stderr with what is wrong, the value and the cure; `--debug` shows the traceback.",
        table(["code", "meaning"], [[str(number), meaning] for number, meaning in ENDINGS.items()]),
        "## Environment variables",
        "None is needed.",
        table(
            ["variable", "what it does"], [[_names(names), meaning] for names, meaning in ENVIRONMENT.items()]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> list[str]:
    command = COMMANDS[name]
    more = ["Its keys are in [Keys](keys.md)."] if command.configured else []
    examples = "\n".join(["```sh", *command.examples, "```"])
    return [f"## gpipe {name}", f"{code(command.usage)}: {command.summary}.", *more, examples]


def _names(names: str) -> str:
    return ", ".join(map(code, names.split(", ")))
