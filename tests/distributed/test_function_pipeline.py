"""TorchDistPackage's two examples with its own names, on two and three processes, against one that has the whole model.

The original divided nothing by the number of micro-batches, lost the rows that did not divide, died on a middle stage
and added up norms: each of that would show here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gpipe_cli.distributed import (
    clip_grad_norm_,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_uniform,
    tpc,
)
from gpipe_cli.distributed.function_pipeline import Peer
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.vision import torchvision
from tests.distributed.conftest import Become
from tests.distributed.posted_operations import recording
from tests.distributed.rendezvous import RECEIVE, SEND
from tests.support.forked_ranks import run_ranks

ROWS, MICRO_BATCHES, MAX_NORM = 10, 4, 0.5


def whole_model() -> list[nn.Module]:
    """Example: partition a Resnet into stages."""
    torch.manual_seed(0)
    resnet = torchvision.models.resnet  # with half the blocks of resnet18
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    layer_list = [
        *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"),
        *(lambda x: torch.flatten(x, 1), "fc"),
    ]
    layers: list[nn.Module] = flatten_model(model, layer_list, return_list=True)
    return layers


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return samples, torch.randint(0, 10, (ROWS,), generator=generator)


criterion = nn.CrossEntropyLoss()


def train_resnet(model: nn.Module, samples: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Example: Train Resnet."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not tpc.is_first_in_pipeline_group():
        targets = torch.empty_like(targets)
    distributed.broadcast(targets, tpc.get_ranks_in_group("pipe")[0], tpc.get_group("pipe"))
    inputs = []
    if tpc.is_first_in_pipeline_group():
        inputs.append(samples)
    elif tpc.is_last_in_pipeline_group():
        inputs.append(targets)

    def bwd_fn(output_obj: Any, output_obj_grad: Any) -> None:
        output_obj.backward(output_obj_grad)

    def fwd_fn(inputs: Any) -> Any:
        if not tpc.is_last_in_pipeline_group():
            return model(inputs)
        return criterion(model(inputs[0]), inputs[1])

    results = {}
    for custom in (bwd_fn, None):  # gradients of the first call are gone when the second begins
        loss = forward_backward(
            optimizer, fwd_fn, custom, inputs, num_microbatches=MICRO_BATCHES, scatter_gather_tensors=False
        )
        results[f"loss {'by hand' if custom else ''}"] = loss if loss is not None else torch.zeros(0)
    results |= {
        f"gradient {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for norm_type in (float("inf"), 2.0):  # the first clips nothing
        limit = MAX_NORM if norm_type == 2 else 1e9
        results[f"norm {norm_type}"] = clip_grad_norm_(model.parameters(), limit, norm_type)
    optimizer.step()
    return results | {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}


def evaluate_resnet(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Example: Train Resnet -- Evaluation."""
    model.eval()
    inputs = [images] if tpc.is_first_in_pipeline_group() else None

    def eval_fwd(img: Any) -> Any:
        return model(img)

    output = forward_backward(None, eval_fwd, None, inputs, num_microbatches=3, forward_only=True)
    at_once = forward_eval(eval_fwd, inputs)
    if not tpc.is_last_in_pipeline_group():
        assert output is None and at_once is None
        return {}
    return {"output": output, "output at once": at_once}


def several_tensors(position: int, last: bool) -> dict[str, Tensor]:
    """Floats, whole numbers and truth values cross together, in shapes that differ from one to the next."""
    weight = torch.full((3,), 2.0 + position, requires_grad=True)
    inputs = [torch.arange(15.0).reshape(5, 3), torch.arange(5)] if position == 0 else []

    def forward(given: Any) -> Any:
        value, index, *more = given
        value.mul_(1.0) if position else None  # in place on what was received
        value = value * weight
        if last:
            return (value.sum(1) * index * more[0]).mean()
        return value, index, index > 1, value.detach().new_zeros(len(index), 7)[:, : 2 + position]

    loss = forward_backward(None, forward, None, inputs, num_microbatches=2)
    assert weight.grad is not None
    return {"several gradient": weight.grad, "several loss": torch.zeros(0) if loss is None else loss}


KEYWORDS = {"ids": torch.arange(15.0).reshape(5, 3), "mask": torch.arange(15).reshape(5, 3) % 4 > 0}
LABELS = {"target": torch.arange(5.0), "weight": torch.arange(5.0) + 1}


def keyword_arguments(position: int, last: bool) -> dict[str, Tensor]:
    """The first process takes a dict, the last one another besides what it receives."""
    scale = torch.full((3,), 2.0 + position, requires_grad=True)

    def forward(given: Any) -> Any:
        if position == 0:
            assert given.keys() == KEYWORDS.keys()
            return given["ids"] * given["mask"] * scale
        if not last:
            return given * scale
        value, labels = given
        return (((value * scale).sum(1) - labels["target"]) * labels["weight"]).mean()

    inputs = KEYWORDS if position == 0 else LABELS if last else {}
    loss = forward_backward(None, forward, None, inputs, num_microbatches=2)
    assert scale.grad is not None
    return {"keyword gradient": scale.grad, "keyword loss": torch.zeros(0) if loss is None else loss}


def crossing_in(dtype: torch.dtype, position: int, last: bool) -> dict[str, Tensor]:
    inputs = [torch.full((2, 2), 1.001)] if position == 0 else []
    received: list[Tensor] = []

    def forward(given: Any) -> Any:
        received.append(given)
        return given.float()

    forward_eval(forward, inputs, dtype)
    assert position == 0 or received[0].dtype is dtype
    return {"crossed": received[0].float()} if last else {}


def both_examples(rank: int, size: int, folder: Path) -> None:
    pp_size = size
    tpc.setup_process_groups([("data", size / pp_size), ("pipe", pp_size)])
    tpc.test_comm()
    samples, targets = batch()
    model = nn.Sequential(*partition_uniform(whole_model()))
    last = tpc.is_last_in_pipeline_group()
    results = {
        **train_resnet(model, samples, targets),
        **evaluate_resnet(model, samples),
        **several_tensors(rank, last),
        **keyword_arguments(rank, last),
        **crossing_in(torch.bfloat16, rank, last),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in results.items()}, folder / f"rank-{rank}.safetensors"
    )


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
def single_rank(become: Become) -> None:
    become(0, 1, ("data", 1), ("pipe", 1))


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


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": lambda layers: DistributedDataParallel(layers, process_group=tpc.get_group("data")),
    "DDP in a module": lambda layers: nn.Sequential(DistributedDataParallel(layers)),
    "FSDP": lambda layers: FullyShardedDataParallel(layers, device_id=torch.device("cpu")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapper_that_gave_wrong_gradients_in_silence_is_refused_with_what_to_use(
    single_rank: None, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    trainer = SimpleNamespace(model=wrap(nn.Linear(4, 3)))  # found wherever the function has it from
    samples = torch.ones(16, 4)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"^fwd_fn: \w+DataParallel around .*distributed\.average_gradients\(model"
        ):
            forward_backward(None, lambda rows: trainer.model(rows).mean(), None, samples, MICRO_BATCHES)
    # Without gradients nothing can be wrong, and outside of a pipe a wrapper is its owner's business.
    assert forward_eval(lambda rows: trainer.model(rows), samples).shape == (16, 3)
    assert trainer.model(samples).requires_grad


@pytest.mark.slow
def test_a_compiled_partition_stays_compiled(single_rank: None) -> None:
    """A global forward hook, the obvious way to see wrappers, makes torch.compile give up without a word."""
    torch.compiler.reset()  # tests before this one may have reached the limit of recompilations
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.compile(nn.Linear(4, 3), backend=backend)
    for _ in range(3):
        forward_backward(None, lambda rows: model(rows).mean(), None, torch.ones(16, 4), MICRO_BATCHES)
    assert len(graphs) == 1


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
