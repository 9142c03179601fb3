from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.run import division

SINGLE = {"engine": {"_target_": "gpipe_cli.engines.single.build"}}


def train(**values: Any) -> TrainConfig:
    return TrainConfig(**{"engine": {"_target_": "gpipe_cli.engines.threads.build"}, **values})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this machine so many cores and accelerators."""

    def make(cores: int, gpus: int = 0) -> None:
        monkeypatch.setattr(division, "available_cores", lambda: cores)
        if gpus:
            monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
            monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)

    return make


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, []),  # two workers, each with one thread as in a run alone
        (SINGLE, ["threads=4"]),
        ({"partitions": 1}, ["threads=4"]),
        ({**SINGLE, "threads": 3}, []),
        ({"devices": ["cpu", "cpu"]}, []),
        ({"devices": ["cpu"]}, ["threads=4"]),
    ],
)
def test_jobs_on_the_cpu_share_its_cores(machine: Any, values: dict[str, Any], share: list[str]) -> None:
    machine(cores=8)
    assert [division.share_of_slot(train(**values), 2, slot) for slot in (0, 1)] == [share, share]


@pytest.mark.parametrize(
    ("values", "jobs", "lists"),
    [
        ({}, 2, ["cuda:0,cuda:1", "cuda:2,cuda:3"]),
        ({}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({}, 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"devices": 2}, 2, ["cuda:0", "cuda:1"]),
        ({"devices": [3, 3]}, 2, ["cuda:3", "cuda:3"]),
    ],
)
def test_accelerators_are_divided_evenly_in_their_order(
    machine: Any, values: dict[str, Any], jobs: int, lists: list[str]
) -> None:
    machine(cores=8, gpus=4)
    shares = [division.share_of_slot(train(**values), jobs, slot) for slot in range(jobs)]
    assert shares == [[f"devices=[{devices}]", f"threads={8 // jobs}"] for devices in lists]


def test_more_jobs_than_the_machine_can_run_are_refused(machine: Any) -> None:
    machine(cores=2)
    with pytest.raises(ConfigError, match=r"jobs=3: this machine has 2 cores; give at most jobs=2"):
        division.check_jobs(train(), 3)
    machine(cores=2, gpus=2)
    division.share_of_slot(train(), 2, 1)
    with pytest.raises(ConfigError, match=r"jobs=3: devices=auto gives 2, and each job needs one"):
        division.check_jobs(train(), 3)
