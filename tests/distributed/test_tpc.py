"""The names of TorchDistPackage's programs: its context `tpc`, its launch, how it divides layers, and gradients.

Gradients of two replicas of a pipe of two processes are those of one process that has the whole model and batch.
"""

from __future__ import annotations

import os
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gpipe_cli import distributed
from gpipe_cli.distributed import (
    average_gradients,
    clip_grad_norm_,
    forward_backward,
    get_group,
    is_last_in_pipeline_group,
    is_using_pp,
    partition_balanced,
    partition_uniform,
    setup_distributed,
    setup_process_groups,
    tpc,
)
from gpipe_cli.errors import ConfigError
from tests.distributed.conftest import Become
from tests.support.forked_ranks import run_ranks


def test_every_public_name_comes_from_one_module() -> None:
    for name in distributed.__all__:
        assert getattr(distributed, name) is getattr(tpc, name)
    with pytest.raises(ImportError, match="cannot import name 'NaiveDDP'"):
        from gpipe_cli.distributed import NaiveDDP  # noqa: F401


def test_the_context_tells_a_process_its_place(become: Become) -> None:
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
    become: Become, layers: int, processes: int, extra: int, sizes: list[int]
) -> None:
    """It was the first ones, so a program got other layers than with TorchDistPackage."""
    whole: list[nn.Module] = [nn.Identity() for _ in range(layers)]
    parts = []
    for rank in range(processes):
        become(rank, processes, ("pipe", processes))
        parts.append(partition_uniform(whole, extra))
        assert list(partition_uniform(nn.Sequential(*whole), extra)) == parts[-1]
    assert [len(part) for part in parts] == sizes and list(chain(*parts)) == whole


def test_layers_can_be_divided_by_their_parameters(become: Become) -> None:
    whole = [nn.Linear(1, size) for size in (9, 1, 2, 4)] + [nn.Tanh()]
    parts = []
    for rank in range(2):
        become(rank, 2, ("pipe", 2))
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


def test_a_program_connects_as_torchrun_tells_it(monkeypatch: pytest.MonkeyPatch, become: Become) -> None:
    """Inside a Slurm job too, where SLURM_PROCID is that of torchrun, the same for all its processes."""
    port = free_port()
    environment(monkeypatch, RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURM_PROCID=3)
    assert setup_distributed() == (0, 1, port, "127.0.0.1")
    assert torch.distributed.get_backend() == "gloo"
    distributed.test_comm()


def test_a_program_connects_as_srun_tells_it(
    monkeypatch: pytest.MonkeyPatch, become: Become, tmp_path: Path
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


MICRO_BATCHES = 4
SHARES = {"even": [8, 8], "uneven": [9, 7], "sharded": [8, 8]}
"""How many rows each replica has."""


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(case: str, replica: int) -> dict[str, Tensor]:
    samples, targets = (tensor.split(SHARES[case])[replica] for tensor in batch())
    model, last = partition_uniform(whole_model()), is_last_in_pipeline_group()
    if case == "sharded":
        fully_shard(model, mesh=DeviceMesh.from_group(get_group("data"), "cpu"))

    def fwd_fn(given: Any) -> Any:
        return loss_of(model(given[0]), given[1]) if last else model(given)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # gradients of the first step are gone when the second begins
        inputs = [targets] if last else [samples]
        forward_backward(optimizer, fwd_fn, None, inputs, num_microbatches=MICRO_BATCHES)
        before = [parameter.grad for parameter in model.parameters()]
        if case != "sharded":
            average_gradients(model.parameters(), rows=None if case == "even" else len(samples))
    assert all(
        gradient is parameter.grad for gradient, parameter in zip(before, model.parameters(), strict=True)
    )
    gradients = {
        f"{case} {name}": getattr(
            parameter.grad, "full_tensor", lambda gradient=parameter.grad: gradient
        )().clone()
        for name, parameter in model.named_parameters()
    }
    return gradients | {f"{case} norm": clip_grad_norm_(model.parameters(), 0.01)}


def missing_gradients(replica: int) -> dict[str, Tensor]:
    """Of three parameters, each replica has used another, and none the last."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[replica].sum().backward()
    average_gradients(parameters)
    assert parameters[2].grad is None
    average_gradients([])
    return {
        f"missing {index}": parameter.grad
        for index, parameter in enumerate(parameters[:2])
        if parameter.grad is not None
    }


def work(rank: int, size: int, folder: Path) -> None:
    setup_process_groups([("data", 2), ("pipe", 2)])
    replica = torch.distributed.get_rank(get_group("data"))
    gradients = missing_gradients(replica)
    for case in SHARES:
        gradients |= train(case, replica)
    save_file(gradients, folder / f"rank-{rank}.safetensors")


@pytest.fixture(scope="module")
def replica_gradients(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What the pipes of both replicas found, each as a whole."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, 4, folder)
    ranks = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(4)]
    return [ranks[0] | ranks[1], ranks[2] | ranks[3]]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    model, (samples, targets) = whole_model(), batch()
    loss_of(model(samples), targets).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    return gradients | {"norm": nn.utils.clip_grad_norm_(model.parameters(), 0.01)}


@pytest.mark.parametrize("case", SHARES)
def test_averaged_gradients_are_those_of_the_mean_loss_of_all_rows(
    replica_gradients: list[dict[str, Tensor]], alone: dict[str, Tensor], case: str
) -> None:
    for replica in replica_gradients:
        own = {name.split()[1]: gradient for name, gradient in replica.items() if name.startswith(f"{case} ")}
        assert own.keys() == alone.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, alone[name], msg=name)
    assert all(
        torch.equal(replica_gradients[0][name], replica_gradients[1][name]) for name in replica_gradients[0]
    )


def test_the_original_s_gradients_are_ours_times_the_number_of_micro_batches(
    replica_gradients: list[dict[str, Tensor]],
) -> None:
    """TorchDistPackage adds up the mean losses of the micro-batches; a mean over the replicas follows."""
    model, (samples, targets) = whole_model(), batch()
    for rows, labels in zip(samples.chunk(2 * MICRO_BATCHES), targets.chunk(2 * MICRO_BATCHES), strict=True):
        (loss_of(model(rows), labels) / 2).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, MICRO_BATCHES * replica_gradients[0][f"even {name}"], msg=name
        )


def test_a_gradient_that_a_replica_does_not_have_counts_as_zero(
    replica_gradients: list[dict[str, Tensor]],
) -> None:
    for replica in replica_gradients:
        assert all(torch.equal(replica[f"missing {index}"], torch.full((2,), 0.5)) for index in range(2))


def test_sharded_parameters_are_not_averaged_twice(become: Become) -> None:
    become(0, 1, ("data", 1), ("pipe", 1))
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    with pytest.raises(ConfigError, match="averages gradients itself; remove average_gradients"):
        average_gradients(model.parameters())


def test_without_a_group_of_replicas_nothing_can_be_averaged() -> None:
    with pytest.raises(ConfigError, match=r"the group 'data' needs torch\.distributed"):
        average_gradients(nn.Linear(1, 1).parameters())
