"""Two replicas of a pipe of two processes: gradients are those of one process that has the whole model and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.distributed import (
    average_gradients,
    clip_grad_norm_,
    forward_backward,
    forward_eval,
    get_group,
    is_last_in_pipeline_group,
    partition_uniform,
    setup_process_groups,
)
from gpipe_cli.errors import ConfigError
from tests.support.forked_ranks import run_ranks

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


@pytest.fixture
def one_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    setup_process_groups([("data", 1), ("pipe", 1)])
    yield
    torch.distributed.destroy_process_group()


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": lambda layers: DistributedDataParallel(layers, process_group=get_group("data")),
    "DDP in a module": lambda layers: nn.Sequential(DistributedDataParallel(layers)),
    "FSDP": lambda layers: FullyShardedDataParallel(layers, device_id=torch.device("cpu")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapper_that_gave_wrong_gradients_in_silence_is_refused_with_what_to_use(
    one_of_one: None, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    trainer = SimpleNamespace(model=wrap(nn.Linear(4, 3)))  # found wherever the function has it from
    samples, _ = batch()
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"^fwd_fn: \w+DataParallel around .*distributed\.average_gradients\(model"
        ):
            forward_backward(None, lambda rows: trainer.model(rows).mean(), None, samples, MICRO_BATCHES)
    # Without gradients nothing can be wrong, and outside of a pipe a wrapper is its owner's business.
    assert forward_eval(lambda rows: trainer.model(rows), samples).shape == (16, 3)
    assert trainer.model(samples).requires_grad


@pytest.mark.slow
def test_a_compiled_partition_stays_compiled(one_of_one: None) -> None:
    """A global forward hook, the obvious way to see wrappers, makes torch.compile give up without a word."""
    torch.compiler.reset()  # tests before this one may have reached the limit of recompilations
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.compile(nn.Linear(4, 3), backend=backend)
    for _ in range(3):
        forward_backward(None, lambda rows: model(rows).mean(), None, batch()[0], MICRO_BATCHES)
    assert len(graphs) == 1


def test_sharded_parameters_are_not_averaged_twice(one_of_one: None) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = fully_shard(nn.Linear(4, 3), mesh=mesh)
    with pytest.raises(ConfigError, match="averages gradients itself; remove average_gradients"):
        average_gradients(model.parameters())


def test_without_a_group_of_replicas_nothing_can_be_averaged() -> None:
    with pytest.raises(ConfigError, match=r"the group 'data' needs torch\.distributed"):
        average_gradients(nn.Linear(1, 1).parameters())
