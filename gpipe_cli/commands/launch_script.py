"""gpipe launch-script: print a script that starts a training run on several machines, by Slurm or by torchrun.

The keys of the run are composed and checked as `gpipe train` does, without importing torch. What a script does is in
slurm.sh and torchrun.sh; what differs between scripts stands before that, as variables. Every value that a user gave is
quoted for the shell, and comments are kept on one line, so that no value runs as code.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from gpipe_cli import launch
from gpipe_cli.config.checks import MAX_RANKS, check
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import LaunchScriptConfig
from gpipe_cli.config.words import sets_key, without_keys
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.formatting import one_line
from gpipe_cli.schedule.orders import may_share_devices
from gpipe_cli.values import parse_duration

KINDS = {
    "slurm": ("nodes", "gpus_per_node", "ranks_per_node", "cpus_per_node", "requeue", "port"),
    "torchrun": ("hosts", "gpus_per_node", "ranks_per_node", "port"),
}
"""The keys of each kind of script, besides those of `gpipe train`."""
OWN_KEYS = tuple(dict.fromkeys(("kind", *KINDS["slurm"], *KINDS["torchrun"])))
MIN_JOB_SECONDS = 300
"""Seconds of the shortest Slurm job: gpipe needs some of them to save and stop."""
MAX_MARGIN, MIN_MARGIN = 600, 60
"""Seconds before the end of a Slurm job at which gpipe stops."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def run(settings: LaunchScriptConfig, job: Job) -> Summary:
    kind, words = str(settings.kind), shlex.split(job.line)[2:]
    if problems := list(_problems(settings)):
        raise ConfigError("; ".join(problems))
    _check_own_keys(settings, words)
    machines = Machines.of(settings)
    _check(settings, machines)
    run = Path(str(settings.run_dir)).absolute()
    # In characters that mean nothing to Slurm or torchrun.
    name = re.sub(r"[^\w.-]+", "_", run.name, flags=re.ASCII).strip("-.") or "gpipe"
    made_by = ["gpipe", job.command, kind, *without_keys(words, ("kind",))]
    comments = [f"# Made by: {one_line(shlex.join(made_by))}"]
    variables = {"python": sys.executable, "run": run}
    variables |= {"nodes": machines.nodes, "ranks_per_node": machines.ranks_per_node}
    train_words = [*without_keys(words, (*OWN_KEYS, "resume")), "resume=auto"]
    if not sets_key(job.overrides, "engine"):
        train_words.insert(0, "engine=processes")
    if kind == "slurm":
        seconds = int(parse_duration(str(settings.time_limit)) or 0)
        margin = max(MIN_MARGIN, min(MAX_MARGIN, seconds // 10))
        train_words = [*without_keys(train_words, ("time_limit",)), f"time_limit={seconds - margin}s"]
        options = _slurm_options(name, machines, settings, seconds, margin // 2)
        comments.append(
            "# Submit it with sbatch; add what your cluster asks for, such as --account and --partition."
        )
        comments += [f"#SBATCH {option}" for option in options]
        variables |= _slurm_variables(settings, margin // 2)
    else:
        comments.append(f"# Run it on {', '.join(settings.hosts)}; the first host holds the rendezvous.")
        endpoint, hosts = f"{settings.hosts[0]}:{settings.port or 29500}", "/".join(settings.hosts)
        variables |= {"name": name, "endpoint": endpoint, "hosts": hosts}
    script = _script(kind, comments, variables, train_words)
    if job.shows_result:
        sys.stdout.write(script)
    facts = {"kind": kind, "nodes": machines.nodes, "ranks": machines.ranks, "run_dir": settings.run_dir}
    return {**facts, "script": script}


@final
@dataclass(frozen=True)
class Machines:
    """The machines of a run."""

    nodes: int
    ranks_per_node: int
    given: str
    """The keys that decide the number of ranks, for messages."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @staticmethod
    def of(settings: LaunchScriptConfig) -> Machines:
        count = "ranks_per_node" if settings.gpus_per_node is None else "gpus_per_node"
        per_node = settings.gpus_per_node or settings.ranks_per_node
        nodes = settings.nodes or len(settings.hosts)
        assert per_node is not None, "the configuration was checked"
        where = f"nodes={nodes}" if settings.kind == "slurm" else f"hosts=[{','.join(settings.hosts)}]"
        return Machines(nodes, per_node, f"{where} {count}={per_node}")


def _problems(settings: LaunchScriptConfig) -> Iterator[str]:
    """What is wrong with the keys that this command needs."""
    hosts, by_slurm = settings.hosts, settings.kind == "slurm"
    if settings.kind is None:
        yield "kind: give the kind of script first, slurm or torchrun: gpipe launch-script slurm nodes=2 ..."
    if (settings.gpus_per_node is None) == (settings.ranks_per_node is None):
        yield (
            "give one of gpus_per_node=<number>, with a rank on each GPU, and ranks_per_node=<number>, with ranks on "
            "the CPU"
        )
    if by_slurm and settings.nodes is None:
        yield "nodes: give nodes=<number>"
    if settings.kind == "torchrun" and not (hosts and all(map(_HOST.fullmatch, hosts))):
        yield f"hosts={hosts}: give the names or IPv4 addresses of all hosts, such as [node0,node1]"
    if len({*hosts}) < len(hosts):
        yield f"hosts={hosts}: names a host twice; give ranks_per_node for several ranks on one"
    if settings.run_dir is None:
        yield "run_dir: give run_dir=<directory>, on a disk that all machines share"
    if by_slurm and (parse_duration(settings.time_limit or "") or 0) < MIN_JOB_SECONDS:
        yield "time_limit: give the time limit of the Slurm job, at least 5m: time_limit=4h"


def _check_own_keys(settings: LaunchScriptConfig, words: Sequence[str]) -> None:
    used = KINDS[str(settings.kind)]
    defaults = LaunchScriptConfig()
    for key in OWN_KEYS:
        is_given = sets_key(words, key)
        if is_given and key not in ("kind", *used):
            raise ConfigError(
                f"{key}: has no effect on {settings.kind}, whose keys are {', '.join(used)}; remove it"
            )
        if not is_given and getattr(settings, key) != getattr(defaults, key):
            raise ConfigError(
                f"{key}: give it on the command line; gpipe train reads the file too, and does not have it"
            )


def _check(settings: LaunchScriptConfig, machines: Machines) -> None:
    """Raise ConfigError where devices, partitions or replicas do not fit the ranks."""
    devices, ranks = settings.devices, machines.ranks
    if ranks > MAX_RANKS:
        raise ConfigError(f"{machines.given}: more than {MAX_RANKS} ranks")
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


def _slurm_options(
    name: str, machines: Machines, settings: LaunchScriptConfig, seconds: int, warning: int
) -> list[str]:
    """warning: how many seconds before its end Slurm signals a job that has not stopped by itself."""
    cpus = settings.cpus_per_node
    return [
        f"--job-name={name}",
        f"--nodes={machines.nodes} --ntasks-per-node=1",
        *([] if settings.gpus_per_node is None else [f"--gpus-per-node={settings.gpus_per_node}"]),
        "--exclusive" if cpus is None else f"--cpus-per-task={cpus}",
        f"--time={seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02} --signal=TERM@{warning}",
        f"{'--requeue' if settings.requeue else '--no-requeue'} --open-mode=append",
    ]


def _slurm_variables(settings: LaunchScriptConfig, warning: int) -> dict[str, object]:
    cpus = settings.cpus_per_node
    return {
        # Whole nodes may differ in their CPUs: each torchrun may use all of its own.
        "cpus": "--cpu-bind=none" if cpus is None else f"--cpus-per-task={cpus}",
        # By default one that depends on the number of the job, for nodes that several jobs share.
        "port": settings.port or "",
        "requeues": settings.requeue,
        "shutdown_seconds": warning - 10,
    }
