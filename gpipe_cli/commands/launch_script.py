"""gpipe launch-script: print a script that starts a training run on several machines, by Slurm or by torchrun.

The keys of the run are composed and checked as `gpipe train` does, without importing torch. What a script does is in
slurm.sh and torchrun.sh; what differs between scripts stands before that, as variables. Every value that a user gave is
quoted for the shell, and comments are kept on one line, so that no value runs as code.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import final

from gpipe_cli import launch
from gpipe_cli.arguments import Invocation
from gpipe_cli.config.checks import AT_MOST, check
from gpipe_cli.config.compose import Request, compose
from gpipe_cli.config.keys import known_keys
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.config.words import override_group, override_key, without_keys
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.formatting import one_line
from gpipe_cli.report.output import print_status
from gpipe_cli.schedule.own_orders import may_share_devices
from gpipe_cli.values import parse_duration

NAME = "launch-script"
KINDS = {
    "slurm": ("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "requeue", "port"),
    "torchrun": ("hosts", "gpus_per_node", "ranks_per_node", "port"),
}
"""The keys of each kind of script, besides those of `gpipe train`."""
ENGINE = "gpipe_cli.engines.processes.build"
SHORTEST_SECONDS = 300
LARGEST_MARGIN, SMALLEST_MARGIN = 600, 60
"""Seconds before the end of a Slurm job at which gpipe stops."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def run(invocation: Invocation) -> None:
    kind, *words = invocation.words or ("",)
    if kind not in KINDS:
        raise ConfigError(f"give the kind of script first, slurm or torchrun: gpipe {NAME} slurm nodes=2 ...")
    own, words = _split(kind, words)
    machines = Machines.of(kind, own)
    settings, train_words = _settings(words, invocation)
    _check(settings, machines)
    run = Path(str(settings.run_dir)).absolute()
    # In characters that mean nothing to Slurm or torchrun.
    name = re.sub(r"[^\w.-]+", "_", run.name, flags=re.ASCII).strip("-.") or "gpipe"
    made_by = one_line(shlex.join(["gpipe", NAME, *invocation.typed]))
    comments, variables = [f"# Made by: {made_by}"], {"python": sys.executable, "run": run}
    variables |= {"nodes": machines.nodes, "ranks_per_node": machines.ranks_per_node}
    if kind == "slurm":
        seconds = _job_seconds(settings)
        margin = max(SMALLEST_MARGIN, min(LARGEST_MARGIN, seconds // 10))
        train_words = [*without_keys(train_words, ("time_limit",)), f"time_limit={seconds - margin}s"]
        options = _slurm_options(name, machines, own, seconds, margin // 2)
        comments.append(
            "# Submit it with sbatch; add what your cluster asks for, such as --account and --partition."
        )
        comments += [f"#SBATCH {option}" for option in options]
        variables |= _slurm_variables(own, margin // 2)
    else:
        port = _number(own, "port", default=29500, most=65535)
        comments.append(f"# Run it on {', '.join(machines.hosts)}; the first host holds the rendezvous.")
        endpoint, hosts = f"{machines.hosts[0]}:{port}", "/".join(machines.hosts)
        variables |= {"name": name, "endpoint": endpoint, "hosts": hosts}
    script = _script(kind, comments, variables, train_words)
    if invocation.json:
        facts = {"kind": kind, "nodes": machines.nodes, "ranks": machines.ranks, "run_dir": settings.run_dir}
        sys.stdout.write(f"{json.dumps({**facts, 'script': script})}\n")
    else:
        sys.stdout.write(script)


@final
@dataclass(frozen=True)
class Machines:
    """The machines of a run."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool
    given: str
    """The keys that decide the number of ranks, for messages."""
    hosts: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @staticmethod
    def of(kind: str, own: Mapping[str, str]) -> Machines:
        counts = [key for key in ("gpus_per_node", "ranks_per_node") if key in own]
        if len(counts) != 1:
            raise ConfigError(
                "give one of gpus_per_node=<number>, with a rank on each GPU, and ranks_per_node=<number>, "
                "with ranks on the CPU"
            )
        per_node = _number(own, counts[0])
        hosts = _hosts(own) if kind == "torchrun" else ()
        nodes = len(hosts) if hosts else _number(own, "nodes")
        where = f"hosts={own['hosts']}" if hosts else f"nodes={nodes}"
        machines = Machines(nodes, per_node, "gpus_per_node" in own, f"{where} {counts[0]}={per_node}", hosts)
        if machines.ranks > AT_MOST["devices"]:
            raise ConfigError(f"{machines.given}: more than {AT_MOST['devices']} ranks")
        return machines


def _split(kind: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The keys of the script, and the words for `gpipe train`."""
    own: dict[str, str] = {}
    train_keys = {*(field.name for field in fields(TrainConfig)), "config", "recipe", "recipes"}
    for word in words:
        key, _, value = word.partition("=")
        if key in KINDS[kind]:
            if not value or key in own:
                raise ConfigError(f"{key}: give {key}=<value> once")
            own[key] = value
        elif any(key in keys for keys in KINDS.values()):
            raise ConfigError(
                f"{key}: has no effect on {kind}, whose keys are {', '.join(KINDS[kind])}; leave it out"
            )
        elif "=" in word and override_group(word) not in train_keys:
            raise ConfigError(f"unknown key '{key}'; {or_list(key, [*KINDS[kind], *known_keys('train')])}")
    return own, [word for word in words if word.partition("=")[0] not in own]


def _settings(words: list[str], invocation: Invocation) -> tuple[TrainConfig, list[str]]:
    """The settings of the run, and the words that give them to `gpipe train`."""
    if not any(override_key(word) in ("engine", "engine._target_") for word in words):
        words = ["engine=processes", *words]
    config = compose(Request("train", tuple(words), invocation.config_name, invocation.config_dir))
    settings = config.settings
    assert isinstance(settings, TrainConfig), "of gpipe train"
    if settings.engine["_target_"] != ENGINE:
        raise ConfigError(
            "engine: only engine=processes runs on several machines; give that, or leave it out"
        )
    if settings.resume not in (None, "auto"):
        raise ConfigError(
            f"resume={settings.resume}: the script itself resumes the run in run_dir; "
            f"give run_dir={settings.resume} instead"
        )
    if settings.run_dir is None:
        raise ConfigError("run_dir: give run_dir=<directory>, on a disk that all machines share")
    for note in config.notes:
        print_status(note)
    flags = {"--config-dir": invocation.config_dir, "--config-name": invocation.config_name}
    flag_words = [part for flag, value in flags.items() if value is not None for part in (flag, value)]
    return settings, [*without_keys(words, ("resume",)), "resume=auto", *flag_words]


def _check(settings: TrainConfig, machines: Machines) -> None:
    """Raise ConfigError where devices, partitions or replicas do not fit the ranks."""
    devices, ranks = settings.devices, machines.ranks
    count = len(devices) if isinstance(devices, list) else devices
    if devices != "auto" and count != ranks:
        raise ConfigError(f"devices={devices}: {machines.given} make {ranks} ranks; give a device for each")
    fitting = replace(settings, devices=ranks)
    if settings.partitions is None and not may_share_devices(settings.schedule.name):
        fitting = replace(fitting, partitions=max(1, ranks // settings.data_parallel))
    try:
        check(fitting)
    except ConfigError as error:
        raise ConfigError(f"{machines.given} make {ranks} ranks: {error}") from error


def _script(kind: str, comments: list[str], variables: Mapping[str, object], words: list[str]) -> str:
    lines = [
        "#!/bin/bash",
        "# shellcheck disable=SC2016  # single quotes, because the values are to stay as they are",
        *comments,
        "",
        f"cd {shlex.quote(str(Path.cwd()))} || exit",
        *(f"{name}={shlex.quote(str(value))}" for name, value in variables.items()),
        "command=(" + "\n    ".join(map(shlex.quote, ["train", *words])) + ")",
        "",
        (Path(launch.__file__).with_name(f"{kind}.sh")).read_text(encoding="utf-8"),
    ]
    return "\n".join(lines)


def _job_seconds(settings: TrainConfig) -> int:
    seconds = parse_duration(settings.time_limit) if settings.time_limit else None
    if seconds is None or seconds < SHORTEST_SECONDS:
        raise ConfigError("time_limit: give the time limit of the Slurm job, at least 5m: time_limit=4h")
    return int(seconds)


def _slurm_options(
    name: str, machines: Machines, own: Mapping[str, str], seconds: int, warning: int
) -> list[str]:
    """warning: how many seconds before its end Slurm signals a job that has not stopped by itself."""
    return [
        f"--job-name={name}",
        f"--nodes={machines.nodes} --ntasks-per-node=1",
        *([f"--gpus-per-node={machines.ranks_per_node}"] if machines.has_gpus else []),
        f"--cpus-per-task={_number(own, 'cpus_per_node')}" if "cpus_per_node" in own else "--exclusive",
        f"--time={seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02} --signal=TERM@{warning}",
        f"{'--requeue' if _requeues(own) else '--no-requeue'} --open-mode=append",
    ]


def _slurm_variables(own: Mapping[str, str], warning: int) -> dict[str, object]:
    return {
        # Whole nodes may differ in their CPUs: each torchrun may use all of its own.
        "cpus": f"--cpus-per-task={own['cpus_per_node']}" if "cpus_per_node" in own else "--cpu-bind=none",
        # By default one that depends on the number of the job, for nodes that several jobs share.
        "port": _number(own, "port", most=65535) if "port" in own else "",
        "requeues": _requeues(own),
        "shutdown_seconds": warning - 10,
    }


def _requeues(own: Mapping[str, str]) -> int:
    return _number(own, "requeue", default=0, least=0, most=1000)


def _number(
    own: Mapping[str, str], key: str, *, default: int | None = None, least: int = 1, most: int = 10**6
) -> int:
    if key not in own and default is not None:
        return default
    value = own.get(key, "")
    if not (value.isascii() and value.isdecimal() and len(value) < 8 and least <= int(value) <= most):
        raise ConfigError(
            f"{key}={value}: give a whole number from {least} to {most}"
            if value
            else f"{key}: give {key}=<number>"
        )
    return int(value)


def _hosts(own: Mapping[str, str]) -> tuple[str, ...]:
    value = own.get("hosts", "")
    hosts = tuple(host.strip() for host in value.removeprefix("[").removesuffix("]").split(","))
    if not value or not all(map(_HOST.fullmatch, hosts)):
        raise ConfigError(
            f"hosts={value}: give the names or IPv4 addresses of all hosts, such as [node0,node1]"
        )
    if len({*hosts}) < len(hosts):
        raise ConfigError(f"hosts={value}: names a host twice; give ranks_per_node for several ranks on one")
    return hosts
