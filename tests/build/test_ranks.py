from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import distributed

from gpipe_cli.build.ranks import settings_for_rank
from gpipe_cli.config.job import Job, Rank
from gpipe_cli.config.schema import ScheduleConfig, TrainConfig
from gpipe_cli.errors import ConfigError, GpipeError, PeerError
from gpipe_cli.launch.rank import is_main_process
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.launch.rank_setup import describe_ranks
from gpipe_cli.runs.resume import load_resumed_run
from tests.support.command_line import Gpipe

JOB = Job("train", (), "gpipe train", OmegaConf.create(), "model", TrainConfig(), json=True)
CPU = torch.device("cpu")


def settings(engine: str = "processes", **more: Any) -> TrainConfig:
    return TrainConfig(engine={"_target_": f"gpipe_cli.engines.{engine}.build"}, **more)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the second of four."""
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    given = {"TORCHELASTIC_RUN_ID": "x", **ranks}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_a_process_that_is_no_rank_is_the_main_process_and_keeps_its_settings() -> None:
    assert is_main_process()
    assert settings_for_rank(settings("threads"), JOB) == settings("threads")


def test_under_torchrun_rank_0_is_the_main_process_and_each_rank_has_a_device_of_its_machine(
    torchrun: None,
) -> None:
    assert not is_main_process()
    assert settings_for_rank(settings(), JOB).devices == ["cpu"] * 4
    assert settings_for_rank(settings(devices=["cpu"] * 4), JOB).devices == ["cpu"] * 4


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)


def test_under_torchrun_a_rank_gets_the_accelerator_with_its_local_number(
    torchrun: None, two_accelerators: None
) -> None:
    assert settings_for_rank(settings(), JOB).devices == ["cuda:1"] * 4


def test_more_ranks_than_accelerators_on_a_machine_are_refused(
    torchrun: None, two_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    says = r"devices=auto: torchrun started 4 processes on a machine with 2 accelerators; give --nproc-per-node=2"
    with pytest.raises(ConfigError, match=says):
        settings_for_rank(settings(), JOB)


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (
            ["cuda:0", "cuda:1", "cuda:1", "cuda:0"],
            r"gives cuda:0 to 2 ranks, and each needs a device of its own",
        ),
        (["cpu", "cuda:1", "cpu", "cuda:0"], "ranks need devices of one type"),
    ],
)
def test_devices_that_ranks_of_one_machine_cannot_have_are_refused(
    torchrun: None, two_accelerators: None, devices: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_for_rank(settings(devices=devices), JOB)


def test_two_machines_may_have_devices_of_the_same_names(
    torchrun: None, two_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert settings_for_rank(settings(devices=devices), JOB).devices == devices


def test_the_launcher_refuses_devices_before_it_starts_a_rank(
    gpipe: Gpipe, two_accelerators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("engine=processes", "model=mlp", "data=digits", "--dry-run")
    answer = gpipe("train", *words, "devices=[cuda:0,cuda:0]")
    assert answer.code == 2 and "gives cuda:0 to 2 ranks" in answer.err
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: False)
    answer = gpipe("train", *words, "devices=2")
    assert answer.code == 2 and "'cuda:0' needs the backend nccl, which this build" in answer.err


def test_a_rank_uses_the_balance_that_its_launcher_found(torchrun: None) -> None:
    job = Job(**{**vars(JOB), "rank": Rank(RankFiles(Path()), [3, 1, 4])})
    assert settings_for_rank(settings(partitions=3), job).balance["layers"] == [3, 1, 4]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (settings("threads"), "engine=threads: runs in one process, but torchrun started 4"),
        (settings(partitions=3), "partitions=3 data_parallel=1: need 3 processes, torchrun started 4"),
        (settings(partitions=4, data_parallel=2), "need 8 processes, torchrun started 4"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_refused(
    torchrun: None, given: TrainConfig, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_for_rank(given, JOB)


def test_interleaved_partitions_may_outnumber_the_processes(torchrun: None) -> None:
    given = settings(partitions=8, schedule=ScheduleConfig("interleaved"))
    assert len(settings_for_rank(given, JOB).devices) == 4


def test_ranks_are_described_by_their_partitions_and_replicas() -> None:
    assert describe_ranks((0, 1), 1) == ["partition 0", "partition 1"]
    assert describe_ranks((0, 1, 0, 1), 1) == ["partitions 0, 2", "partitions 1, 3"]
    assert describe_ranks((0, 1, 1, 0), 1) == ["partitions 0, 3", "partitions 1, 2"]
    assert describe_ranks((0,), 2) == ["partition 0 of replica 0", "partition 0 of replica 1"]


@pytest.mark.parametrize(
    ("keys", "torchruns", "kind", "says"),
    [
        (
            {"resume": "auto"},
            (2, 0),
            ConfigError,
            "=2: with torchrun, give run_dir=... and resume=auto, so that",
        ),
        (
            {"run_dir": "r"},
            (2, 0),
            ConfigError,
            "=2: with torchrun, give run_dir=... and resume=auto, so that",
        ),
        (
            {"run_dir": "r", "resume": "auto"},
            (1, 0),
            ConfigError,
            "engine.max_restarts=2: torchrun restarts ranks 1 times; start it with --max-restarts=2",
        ),
        (
            {"run_dir": "r", "resume": "auto"},
            (9, 3),
            PeerError,
            "engine.max_restarts=2: torchrun has restarted the ranks 3 times",
        ),
    ],
)
def test_restarts_by_torchrun_must_find_the_run_and_end(
    torchrun: None,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, str],
    torchruns: tuple[int, int],
    kind: type[GpipeError],
    says: str,
) -> None:
    for name, value in zip(("MAX_RESTARTS", "RESTART_COUNT"), torchruns, strict=True):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", str(value))
    asked = settings(**keys)
    asked = replace(asked, engine={**asked.engine, "max_restarts": 2})
    with ExitStack() as cleanup, pytest.raises(kind, match=re.escape(says)):
        load_resumed_run(asked, JOB, cleanup)
