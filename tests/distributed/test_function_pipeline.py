"""The seed's two examples on two and three processes, against one process that has the whole model.

The original divided nothing by the number of micro-batches, lost the rows that did not divide, died on a middle stage
and added up norms: each of that would show here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_process_groups
from gpipe_cli.distributed.function_pipeline import Peer
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.boundary import PartitionInput
from tests.distributed.posted_operations import recording
from tests.distributed.rendezvous import RECEIVE, SEND
from tests.distributed.seed_examples import (
    KEYWORDS,
    LABELS,
    MAX_NORM,
    MICRO_BATCHES,
    batch,
    both_examples,
    criterion,
    whole_model,
)
from tests.support.forked_ranks import run_ranks

RankResults = list[dict[str, Tensor]]


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3], ids=["2 ranks", "3 ranks"]
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """What each process of a pipe found; one launch for all cases."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    run_ranks(both_examples, size, folder)
    return [load_file(folder / f"rank-{rank}.safetensors") for rank in range(size)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The same in this process: micro-batch by micro-batch, each weighted by its rows."""
    torch.set_num_threads(1)
    layers = whole_model()
    model = nn.Sequential(*layers)
    samples, targets = batch()
    total = torch.zeros(())
    for _ in range(2):  # the example runs its step twice, and batch norm remembers
        model.zero_grad()
        parts = zip(samples.tensor_split(MICRO_BATCHES), targets.tensor_split(MICRO_BATCHES), strict=True)
        losses = [criterion(model(rows), labels) * (len(rows) / len(samples)) for rows, labels in parts]
        for loss in losses:
            loss.backward()
        total = torch.stack([loss.detach() for loss in losses]).sum()
    gradients = {f"gradient {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    norms = {
        "norm inf": nn.utils.clip_grad_norm_(model.parameters(), 1e9, float("inf")),
        "norm 2.0": nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    }
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    parameters = {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        output, at_once = torch.cat([model(rows) for rows in samples.tensor_split(3)]), model(samples)
    return {**gradients, **norms, **parameters, "loss ": total, "output": output, "output at once": at_once}


def by_whole_name(ranks: RankResults, kind: str) -> dict[str, Tensor]:
    """Of all processes, with the layers counted through."""
    starts = [rank * (len(whole_model()) // len(ranks)) for rank in range(len(ranks))]
    return {
        f"{kind} {int(name.split()[1].partition('.')[0]) + start}.{name.partition('.')[2]}": tensor
        for results, start in zip(ranks, starts, strict=True)
        for name, tensor in results.items()
        if name.startswith(f"{kind} ")
    }


def test_every_gradient_is_that_of_the_mean_loss(ranks: RankResults, alone: dict[str, Tensor]) -> None:
    gradients = by_whole_name(ranks, "gradient")
    assert gradients.keys() == {name for name in alone if name.startswith("gradient")}
    assert all(torch.equal(gradients[name], alone[name]) for name in gradients)
    assert torch.equal(ranks[-1]["loss "], alone["loss "])
    assert all(results["loss "].numel() == 0 for results in ranks[:-1])


def test_the_norm_is_that_of_the_whole_model(ranks: RankResults, alone: dict[str, Tensor]) -> None:
    for results in ranks:
        torch.testing.assert_close(results["norm 2.0"], alone["norm 2.0"], rtol=1e-6, atol=0)
        assert torch.equal(results["norm inf"], alone["norm inf"])
    for name, parameter in by_whole_name(ranks, "parameter").items():
        torch.testing.assert_close(parameter, alone[name], rtol=1e-5, atol=1e-7)


def test_evaluation_gives_every_row(ranks: RankResults, alone: dict[str, Tensor]) -> None:
    """Within rounding: the parameters were clipped by norms added up in another order."""
    for name in ("output", "output at once"):
        torch.testing.assert_close(ranks[-1][name], alone[name], rtol=1e-4, atol=1e-5)


def test_several_tensors_of_any_kind_and_shape_cross(ranks: RankResults) -> None:
    value, index = torch.arange(15.0).reshape(5, 3), torch.arange(5)
    weights = [torch.full((3,), 2.0 + rank, requires_grad=True) for rank in range(len(ranks))]
    for weight in weights:
        value = value * weight
    loss = (value.sum(1) * index * (index > 1)).mean()
    loss.backward()
    torch.testing.assert_close(ranks[-1]["several loss"], loss.detach())
    for results, weight in zip(ranks, weights, strict=True):
        torch.testing.assert_close(results["several gradient"], weight.grad)


def test_inputs_may_be_dicts(ranks: RankResults) -> None:
    value = KEYWORDS["ids"] * KEYWORDS["mask"]
    scales = [torch.full((3,), 2.0 + rank, requires_grad=True) for rank in range(len(ranks))]
    for scale in scales:
        value = value * scale
    loss = ((value.sum(1) - LABELS["target"]) * LABELS["weight"]).mean()
    loss.backward()
    torch.testing.assert_close(ranks[-1]["keyword loss"], loss.detach())
    for results, scale in zip(ranks, scales, strict=True):
        torch.testing.assert_close(results["keyword gradient"], scale.grad)


def test_floats_cross_in_the_dtype_asked_for(ranks: RankResults) -> None:
    assert torch.equal(ranks[-1]["crossed"], torch.full((2, 2), 1.001).bfloat16().float())


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    setup_process_groups([("pipe", 1)])
    yield
    distributed.destroy_process_group()


def test_a_pipe_of_one_process_is_plain_training(single_rank: None) -> None:
    assert partition_uniform([nn.Identity()]) and len(partition_uniform(nn.Sequential(nn.Tanh()))) == 1
    weight = torch.ones(3, requires_grad=True)
    loss = forward_backward(None, lambda rows: (rows @ weight).mean(), None, torch.ones(5, 3), 2)
    assert loss == 3 and torch.equal(weight.grad, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "more", "says"),
    [
        ([], {}, "inputs: the first process of a pipe needs the batch"),
        (torch.ones(2), {"num_microbatches": 0}, "num_microbatches=0: must be at least 1"),
        (
            torch.ones(2),
            {"scatter_gather_tensors": True},
            "scatter_gather_tensors=True: divides tensors among",
        ),
        (torch.ones(2), {}, "fwd_fn: the last process of a pipe must give its loss"),
    ],
)
def test_mistakes_are_named(single_rank: None, inputs: list[Tensor], more: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        forward_backward(None, lambda rows: rows, None, inputs, **more)  # type: ignore[arg-type]


def message(rank: int, count: int) -> PartitionInput:
    kinds = [
        torch.full((2, 3), float(rank)).t(),
        torch.tensor(rank),
        torch.empty(0, 4),
        None,
        torch.ones(3, dtype=torch.bool),
        torch.full((5,), 1.5 + rank, dtype=torch.bfloat16),
    ]
    tensors = tuple(kinds[index % len(kinds)] for index in range(count))
    return PartitionInput(tensors, tuple(index % 2 == rank for index in range(count)))


def check(received: PartitionInput, expected: PartitionInput) -> None:
    assert received.needs_grad == expected.needs_grad
    for arrived, tensor in zip(received.tensors, expected.tensors, strict=True):
        if tensor is None or arrived is None:
            assert arrived is tensor
        else:
            assert arrived.dtype == tensor.dtype and torch.equal(arrived, tensor)


def exchanges(rank: int, ranks: int, folder: Path) -> None:
    world = distributed.group.WORLD
    assert world is not None
    other = 1 - rank
    peer = Peer(other, world, torch.device("cpu"))
    # 100 tensors need a longer header than the first message holds; the sides need not send the same.
    for mine, theirs in ((5, 5), (0, 5), (100, 0), (100, 100)):
        counts = (mine, theirs) if rank == 0 else (theirs, mine)
        check(peer.exchange(message(rank, counts[0])), message(other, counts[1]))
        if rank == 0:
            peer.send(message(rank, mine))
        else:
            check(peer.receive(), message(other, mine))
    peer.wait()
    with recording() as recorder:
        peer.exchange(message(rank, 3))
    kinds = [sorted(operation.kind for operation in batch) for batch in recorder.program]
    assert kinds == [[RECEIVE, SEND], [RECEIVE, RECEIVE, SEND, SEND]]


def test_messages_of_any_size_arrive_and_both_directions_are_one_batch(tmp_path: Path) -> None:
    run_ranks(exchanges, 2, tmp_path, 60)
