from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from gpipe_cli.launch import rank_setup
from gpipe_cli.launch.rank_setup import connect_ranks


class Reached(Exception):
    pass


def test_a_rank_makes_its_accelerator_the_current_one_before_it_starts_nccl_bound_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks never set their device: all of them had a context on the first GPU, and NCCL guessed theirs."""
    calls: list[Any] = []

    def start(backend: str, **more: Any) -> None:
        calls.append((backend, more["device_id"]))
        raise Reached

    ranks = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **ranks}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", calls.append)
    monkeypatch.setattr(rank_setup.distributed, "init_process_group", start)
    device = torch.device("cuda", 1)
    with (
        pytest.raises(Reached),
        connect_ranks(None, data_parallel=1, step_timeout=None, device=device),
    ):
        pass
    assert calls == [device, ("cpu:gloo,cuda:nccl", device)]
