"""The names of TorchDistPackage's programs: its context `tpc`, its launch, and how it divides layers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli import distributed
from gpipe_cli.distributed import (
    is_using_pp,
    partition_balanced,
    partition_uniform,
    setup_distributed,
    tpc,
)


@pytest.fixture
def as_rank() -> Iterator[None]:
    yield
    torch.distributed.destroy_process_group()


def become(rank: int, size: int) -> None:
    """This process as one of several ranks, none of the others being there."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def test_every_public_name_comes_from_one_module() -> None:
    for name in distributed.__all__:
        assert getattr(distributed, name) is getattr(tpc, name)
    with pytest.raises(ImportError, match="cannot import name 'NaiveDDP'"):
        from gpipe_cli.distributed import NaiveDDP  # noqa: F401


def test_the_context_tells_a_process_its_place(as_rank: None) -> None:
    become(5, 8)
    assert not is_using_pp() and not tpc.is_mode_inited("pipe")
    tpc.setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)])
    assert is_using_pp() and not tpc.is_mode_inited("moe_dp")
    ranks = [tpc.get_dp_rank(), tpc.get_pp_rank(), tpc.get_tp_rank(), tpc.get_mp_rank()]
    sizes = [tpc.get_dp_size(), tpc.get_pp_size(), tpc.get_tp_size(), tpc.get_mp_size()]
    assert ranks == [1, 0, 1, 1] and sizes == [2, 2, 2, 4]
    assert tpc.get_group_rank("global") == 5 and tpc.get_group_size("global") == 8
    assert tpc.get_next_global_rank("model") == 6 and tpc.get_prev_global_rank("model") == 4
    assert tpc.get_next_global_rank() == tpc.get_prev_global_rank() == 7
    assert tpc.is_first_in_pipeline_group() and not tpc.is_last_in_pipeline_group()
    assert tpc.is_last_in_data_group() and tpc.is_last_in_tensor_group()
    assert not tpc.is_first_in_model_group() and not tpc.is_last_in_model_group()


@pytest.mark.parametrize(
    ("layers", "processes", "extra", "sizes"),
    [
        (11, 4, 0, [2, 2, 2, 5]),
        (11, 4, 3, [3, 3, 3, 2]),
        (3, 4, 0, [0, 0, 0, 3]),
        (4, 2, 0, [2, 2]),
        (2, 3, 7, [2, 0, 0]),
    ],
)
def test_the_last_process_gets_the_remaining_layers(
    as_rank: None, layers: int, processes: int, extra: int, sizes: list[int]
) -> None:
    """It was the first ones, so a program got other layers than with TorchDistPackage."""
    whole: list[nn.Module] = [nn.Identity() for _ in range(layers)]
    parts = []
    for rank in range(processes):
        become(rank, processes)
        tpc.setup_process_groups([("pipe", processes)])
        parts.append(partition_uniform(whole, extra))
        assert list(partition_uniform(nn.Sequential(*whole), extra)) == parts[-1]
    assert [len(part) for part in parts] == sizes and list(chain(*parts)) == whole


def test_layers_can_be_divided_by_their_parameters(as_rank: None) -> None:
    whole = [nn.Linear(1, size) for size in (9, 1, 2, 4)] + [nn.Tanh()]
    parts = []
    for rank in range(2):
        become(rank, 2)
        tpc.setup_process_groups([("pipe", 2)])
        parts.append(partition_balanced(whole, whole))
    assert parts == [whole[:1], whole[1:]]


def environment(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        # Set first, so that what the call sets is gone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_a_program_connects_as_torchrun_tells_it(monkeypatch: pytest.MonkeyPatch, as_rank: None) -> None:
    """Inside a Slurm job too, where SLURM_PROCID is that of torchrun, the same for all its processes."""
    port = free_port()
    environment(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURM_PROCID=3)
    assert setup_distributed() == (0, 1, port, "127.0.0.1")
    assert torch.distributed.get_backend() == "gloo"
    distributed.test_comm()


def test_a_program_connects_as_srun_tells_it(
    monkeypatch: pytest.MonkeyPatch, as_rank: None, tmp_path: Path
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n[ \"$*\" = 'show hostnames 127.0.0.[1-2]' ] && printf '127.0.0.1\\n127.0.0.2\\n'\n"
    )
    scontrol.chmod(0o755)
    environment(
        monkeypatch,
        SLURM_JOB_ID=17,
        SLURM_PROCID=0,
        SLURM_LOCALID=0,
        SLURM_NTASKS=1,
        SLURM_JOB_NODELIST="127.0.0.[1-2]",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    port = free_port()
    assert setup_distributed("gloo", port) == (0, 1, port, "127.0.0.1")
