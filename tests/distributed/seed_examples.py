"""TorchDistPackage's examples with its own names, as what one process of a pipe does.

What each process finds goes to a file of tensors of its own; the test compares it with one process that has all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from gpipe_cli.distributed import (
    clip_grad_norm_,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_uniform,
    test_comm,
    tpc,
)
from gpipe_cli.vision import torchvision

ROWS, MICRO_BATCHES, MAX_NORM = 10, 4, 0.5


def whole_model() -> list[nn.Module]:
    """Example: partition a Resnet into stages."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=10)
    layer_list = [
        *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"),
        *(lambda x: torch.flatten(x, 1), "fc"),
    ]
    layers: list[nn.Module] = flatten_model(model, layer_list, return_list=True)
    return layers


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, 32, 32, generator=generator), torch.randint(
        0, 10, (ROWS,), generator=generator
    )


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
    test_comm()
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
