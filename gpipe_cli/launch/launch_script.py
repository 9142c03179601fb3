"""The text of a bash script that starts one training run on several machines: a Slurm job, or torchrun on each host.

Every value that a user gave is quoted for the shell, and comments are kept on one line, so that no value runs as code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import PeerError, Stopped
from gpipe_cli.report.formatting import one_line
from gpipe_cli.run_state import OUTCOME

LARGEST_MARGIN, SMALLEST_MARGIN = 600, 60
TORCHRUN = "-m torch.distributed.run"
RENDEZVOUS = "--rdzv-backend gpipe --rdzv-endpoint"
"""The host of the endpoint holds the rendezvous. Nothing listens on its other network interfaces."""


@final
@dataclass(frozen=True)
class TrainingCommand:
    """What a script runs, and from where."""

    made_by: str
    """The command line that printed the script."""
    words: Sequence[str]
    """Those of `gpipe train`."""
    run_directory: Path
    folder: Path
    """The one that relative paths start from."""
    python: str

    @property
    def name(self) -> str:
        """That of the run directory, in characters that mean nothing to Slurm or torchrun."""
        return re.sub(r"[^\w.-]+", "_", self.run_directory.name, flags=re.ASCII).strip("-.") or "gpipe"

    def heading(self) -> list[str]:
        return [
            "#!/bin/bash",
            "# shellcheck disable=SC2016  # single quotes, because the values are to stay as they are",
            f"# Made by: {one_line(self.made_by)}",
        ]

    def lines(self) -> list[str]:
        """The variables `python` and `command`."""
        words = "\n    ".join(map(shlex.quote, ["train", *self.words]))
        return [
            f"cd {shlex.quote(str(self.folder))} || exit",
            f"python={shlex.quote(self.python)}",
            f"command=({words})",
        ]


@final
@dataclass(frozen=True)
class SlurmScript:
    """A batch script: torchrun once on each node, and back into the queue until the run has finished."""

    command: TrainingCommand
    nodes: int
    ranks_per_node: int
    has_gpus: bool
    """Whether each rank has a GPU, or else the CPU."""
    cpus_per_node: int | None
    """None: whole nodes."""
    seconds: int
    """The time limit of the job."""
    requeues: int
    """How often the job may go back into the queue."""
    port: int | None
    """None: one that depends on the number of the job, for nodes that several jobs share."""

    def text(self) -> str:
        run = shlex.quote(str(self.command.run_directory))
        cpus = '"$SLURM_CPUS_ON_NODE"' if self.cpus_per_node is None else self.cpus_per_node
        port = "$((20000 + SLURM_JOB_ID % 10000))" if self.port is None else self.port
        lines = [
            *self.command.heading(),
            "# Submit it with sbatch, which also takes what your cluster asks for, such as --account and --partition.",
            *(f"#SBATCH {option}" for option in self._options()),
            "",
            *self.command.lines(),
            f"run={run}",
            "",
            "# How long torchrun waits for ranks that save after a signal.",
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={self._warning_seconds - 10}",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port={port}",
            "",
            "# Runs torchrun once on each node; the first node holds the rendezvous.",
            f"srun --kill-on-bad-exit=0 --cpus-per-task={cpus} \\",
            f'    "$python" {TORCHRUN} --nnodes {self.nodes} --nproc-per-node {self.ranks_per_node} \\',
            f'    --rdzv-id "$SLURM_JOB_ID" {RENDEZVOUS} "$first:$port" -m gpipe_cli "${{command[@]}}"',
            "status=$?",
            "",
            *self._end(),
        ]
        return "\n".join(lines) + "\n"

    @property
    def train_seconds(self) -> int:
        """The time limit of gpipe: early enough to start after the job does, and to save before Slurm ends it."""
        return self.seconds - self._margin

    @property
    def _margin(self) -> int:
        return max(SMALLEST_MARGIN, min(LARGEST_MARGIN, self.seconds // 10))

    @property
    def _warning_seconds(self) -> int:
        """How long before its end Slurm signals a job that has not stopped by itself."""
        return self._margin // 2

    def _options(self) -> list[str]:
        minutes, seconds = divmod(self.seconds, 60)
        return [
            f"--job-name={self.command.name}",
            f"--nodes={self.nodes} --ntasks-per-node=1",
            *([f"--gpus-per-node={self.ranks_per_node}"] if self.has_gpus else []),
            "--exclusive" if self.cpus_per_node is None else f"--cpus-per-task={self.cpus_per_node}",
            f"--time={minutes // 60:02}:{minutes % 60:02}:{seconds:02}",
            f"--signal=TERM@{self._warning_seconds}",
            f"{'--requeue' if self.requeues else '--no-requeue'} --open-mode=append",
        ]

    def _end(self) -> list[str]:
        """Exit as the run did, or put the job back into the queue."""
        exit_code = [
            "# torchrun exits with 1 after any failure. The run has recorded its own exit code, unless it was killed.",
            'if [ "$status" -ne 0 ]; then',
            f'    code=$(sed -n \'s/^  "exit_code": \\([0-9]*\\).*/\\1/p\' "$run/{OUTCOME}" 2>/dev/null)',
            "fi",
        ]
        leave = 'exit "${code:-$status}"'
        if not self.requeues:
            return [*exit_code, leave]
        resumable = f"{Stopped.exit_code} | {PeerError.exit_code} | killed"
        return [
            *exit_code,
            "# A run that stopped, lost a node or was killed can resume from its snapshot. An error would repeat.",
            'if [ "$status" -ne 0 ] && [ -e "$run/config.yaml" ] && [ ! -e "$run/summary.json" ]; then',
            '    case "${code:-killed}" in',
            f"    {resumable})",
            f'        [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.requeues} ] && scontrol requeue "$SLURM_JOB_ID"',
            "        ;;",
            "    esac",
            "fi",
            leave,
        ]


@final
@dataclass(frozen=True)
class TorchrunScript:
    """A script that is the same on every host of a list."""

    command: TrainingCommand
    hosts: Sequence[str]
    """The first one holds the rendezvous."""
    ranks_per_node: int
    port: int

    def text(self) -> str:
        lines = [
            *self.command.heading(),
            f"# Run it on {', '.join(self.hosts)}; the first host holds the rendezvous.",
            *self.command.lines(),
            "",
            f'exec "$python" {TORCHRUN} --nnodes {len(self.hosts)} --nproc-per-node {self.ranks_per_node} \\',
            f"    --rdzv-id {self.command.name} {RENDEZVOUS} {self.hosts[0]}:{self.port} \\",
            '    -m gpipe_cli "${command[@]}"',
        ]
        return "\n".join(lines) + "\n"
