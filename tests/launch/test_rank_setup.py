from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from gpipe_cli.launch import rank_setup
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.launch.rank_setup import connect_ranks


class Reached(Exception):
    pass


def test_a_rank_makes_its_accelerator_the_current_one_before_it_starts_nccl_bound_to_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Ranks never set their device: all of them had a context on the first GPU, and NCCL guessed theirs."""
    calls: list[Any] = []

    def start(backend: str, **more: Any) -> None:
        calls.append((backend, more["device_id"]))
        raise Reached

    ranks = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        **ranks,
        "GLOO_SOCKET_IFNAME": "",
        "NCCL_SOCKET_IFNAME": "",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(rank_setup.distributed, "init_process_group", start)
    device = torch.device("cuda", 1)
    with (
        pytest.raises(Reached),
        connect_ranks(RankFiles(tmp_path), data_parallel=1, step_timeout=None, device=device),
    ):
        pass
    assert calls == [device, ("cpu:gloo,cuda:nccl", device)]
