"""The reference page of commands, flags, exit codes and environment variables, from what `gpipe --help` prints."""

from __future__ import annotations

from gpipe_cli import errors
from gpipe_cli.help import COMMANDS, FLAGS
from make_docs.markdown import GENERATED, code, table

ENVIRONMENT = {
    "XDG_CACHE_HOME": "cache of measured layer times: `$XDG_CACHE_HOME/gpipe`, else `~/.cache/gpipe`",
    "NO_COLOR": "disables colours",
    "TERM=dumb": "prints plain lines instead of a live panel",
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME": "under torchrun: the network interface that the ranks use",
    "WANDB_MODE, MLFLOW_TRACKING_URI": "used as these services define them, if the corresponding key is null",
}
EXIT_CODES = {
    0: "done",
    errors.GpipeError.exit_code: "an error in a layer, with partition, layer and micro-batch, or in gpipe itself",
    errors.ConfigError.exit_code: "a key, value or combination that cannot be used; nothing was started",
    errors.DataError.exit_code: "data that is missing, broken, or does not fit the model",
    errors.RunError.exit_code: "a run or snapshot that is missing or damaged",
    errors.NumericError.exit_code: "a loss or gradient that is not finite",
    errors.ResourceError.exit_code: "memory, disk or permissions",
    errors.PeerError.exit_code: "another process failed or did not answer, or a step took longer than `step_timeout`",
    errors.Stopped.exit_code: "stopped on request (SIGTERM, SIGUSR1, SIGHUP, `time_limit`); can be resumed",
    errors.INTERRUPTED: "stopped by Ctrl-C; can be resumed",
}


def page() -> str:
    parts = [
        GENERATED,
        "# Commands",
        "`gpipe <command> [key=value ...] [flags]`. Results go to stdout, progress and errors to stderr.",
        table(
            ["command", "what it does"],
            [[f"[`gpipe {name}`](#gpipe-{name})", command.summary] for name, command in COMMANDS.items()],
        ),
        *(part for name in COMMANDS for part in _command(name)),
        "## Flags",
        "For commands that take keys; the others accept `--json`, `--debug` and `--help`.",
        table(["flag", "what it does"], [[code(flag), meaning] for flag, meaning in FLAGS.items()]),
        "## Exit codes",
        "An error is one line on stderr that names the key, its value and the cure; `--debug` shows the traceback.",
        table(["code", "meaning"], [[str(number), meaning] for number, meaning in EXIT_CODES.items()]),
        "## Environment variables",
        "All are optional.",
        table(
            ["variable", "what it does"],
            [[_code_list(names), meaning] for names, meaning in ENVIRONMENT.items()],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> list[str]:
    command = COMMANDS[name]
    keys = ["For its keys, see [Keys](keys.md)."] if command.configured else []
    examples = "\n".join(["```sh", *command.examples, "```"])
    return [f"## gpipe {name}", f"{code(command.usage)}: {command.summary}.", *keys, examples]


def _code_list(names: str) -> str:
    return ", ".join(map(code, names.split(", ")))
