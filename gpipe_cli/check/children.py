"""Run a part of the check in processes of its own, with the launcher and supervision of engine=processes.

A communicator that hangs, or a driver that aborts the process, then ends that part only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from gpipe_cli.errors import Interrupted
from gpipe_cli.launch.fork_server import program
from gpipe_cli.launch.heartbeat import Heartbeats
from gpipe_cli.launch.rank_files import RankFiles, RankTask
from gpipe_cli.launch.rank_group import RankGroup, RanksFailed
from gpipe_cli.launch.rank_process import run_rank

TIMEOUT = 60.0
"""Seconds until the children must have finished; most of their time they import torch."""

Part = Callable[[RankFiles, Sequence[torch.device]], Mapping[str, Any]]
"""What a child runs: the files it shares with the others, and the device of each child. The first returns figures."""


def can_start_children() -> bool:
    """Whether this system offers what supervision needs; only Linux does."""
    return hasattr(os, "pidfd_open")


def run_in_children(
    module: str, devices: Sequence[torch.device], timeout: float = TIMEOUT
) -> Mapping[str, Any]:
    """Run `run_part` of a module of this package in one process per device; what the first returns."""
    names = [str(device) for device in devices]

    def arguments(files: RankFiles) -> list[str]:
        files.write_task(RankTask("check", names, "gpipe check", "", "", None, [], time.monotonic()))
        imports = f"import gpipe_cli.check.children, gpipe_cli.check.{module}"
        call = f"gpipe_cli.check.children.run_as_child(sys.argv[1], gpipe_cli.check.{module}.run_part)"
        return program(imports, call, files.folder)

    try:
        report = RankGroup(names, timeout).run(arguments)
    except RanksFailed as failed:
        if isinstance(failed.cause, Interrupted):  # not a result of the check: Ctrl-C ends the whole command
            raise KeyboardInterrupt from failed
        raise failed.cause from failed
    assert report.summary is not None, "the first child reports figures"
    return report.summary


def run_as_child(folder: str, part: Part) -> NoReturn:
    # stdout belongs to the result of the command; libraries write their notices there.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def run(files: RankFiles, task: RankTask) -> Mapping[str, Any]:
        devices = [torch.device(name) for name in task.overrides]
        # The supervisor ends children whose step takes too long: all of this is one step.
        with Heartbeats(files.heartbeats, len(devices)).in_step(int(os.environ["RANK"])):
            return part(files, devices)

    run_rank(folder, run)
