"""The seed's two examples on two and three processes, against one process that has the whole model.

The original divided nothing by the number of micro-batches, lost the rows that did not divide, died on a middle stage
and added up norms: each of that would show here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.distributed import forward_backward, partition_uniform, setup_process_groups
from gpipe_cli.errors import ConfigError
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
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    setup_process_groups([("pipe", 1)])
    yield
    torch.distributed.destroy_process_group()


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


def test_torchs_data_parallel_around_a_stage_is_refused_with_what_to_use_instead(single_rank: None) -> None:
    """With more than one micro-batch its averages were of the first one only, without a word."""
    stage = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    with pytest.raises(ConfigError, match=r"DistributedDataParallel.*gpipe_cli\.distributed"):
        forward_backward(None, lambda rows: stage(rows).mean(), None, torch.ones(4, 3), 2)


def test_an_innocent_stage_is_not_taken_for_data_parallel(single_rank: None) -> None:
    stage = nn.Linear(3, 1)
    loss = forward_backward(None, lambda rows: stage(rows).mean(), None, torch.ones(4, 3), 2)
    torch.testing.assert_close(loss, stage(torch.ones(4, 3)).mean().detach())
