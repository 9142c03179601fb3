"""Layers compiled with torch.compile work in every schedule and checkpoint mode."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.skip.tracker import DictionarySkipTracker, use_skip_tracker

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
CHECKPOINTS = ["always", "except_last", "never"]
CASES = list(itertools.product(SCHEDULES, CHECKPOINTS))

pytestmark = [
    pytest.mark.timeout(600),
    # torch's compiler hides its own warnings with filters that all threads share.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
    ]


def compiled(backend: str) -> nn.Sequential:
    return nn.Sequential(*(torch.compile(layer, backend=backend) for layer in layers()))


def plain_result(model: nn.Sequential, input: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Two steps by plain autograd, micro-batch by micro-batch."""
    for _ in range(2):
        for piece, wanted in zip(input.tensor_split(2), target.tensor_split(2), strict=True):
            with use_skip_tracker(DictionarySkipTracker()):
                (functional.mse_loss(model(piece), wanted) * 0.5).backward()
    return result_of(model)


def result_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: leaf.grad.clone() for name, leaf in model.named_parameters()}
    return gradients | {name: buffer.clone() for name, buffer in model.named_buffers()}


def check(backend: str, cases: list[tuple[str, str]], tolerance: float) -> None:
    """Each layer is compiled once; every case gets its state back."""
    torch.manual_seed(1)
    input, target = torch.randn(4, 1, 4, 4), torch.randn(4, 64)
    model = compiled(backend)
    fresh = copy.deepcopy(model.state_dict())
    expected = plain_result(model, input, target)
    for schedule, checkpoint in cases:
        model.zero_grad()
        model.load_state_dict(fresh)
        options = {"chunks": 2, "schedule": schedule, "checkpoint": checkpoint, "devices": ["cpu"] * 2}
        with GPipe(model, [3, 3], **options) as pipe:
            pipe.step_timeout = 300
            for _ in range(2):
                pipe.step(input, target, functional.mse_loss)
        for name, tensor in result_of(model).items():
            torch.testing.assert_close(
                tensor, expected[name], rtol=tolerance, atol=tolerance, msg=f"{schedule} {checkpoint} {name}"
            )


@pytest.mark.slow
def test_compiled_convolutions_and_batch_norms_are_what_they_are_without_a_pipe() -> None:
    """1f1b raised "modified by an inplace operation" where plain autograd ran."""
    check("aot_eager", CASES, tolerance=0)


@pytest.mark.slow
def test_inductors_layers_are_what_they_are_without_a_pipe() -> None:
    # Inductor makes another kernel for a forward without grad, which checkpointing runs first.
    check("inductor", CASES, tolerance=1e-4)


@pytest.mark.parametrize("call", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_compiled_batch_norm_is_evaluated_and_run_backward_by_the_caller(call: str) -> None:
    model = compiled("aot_eager")
    input = torch.randn(4, 1, 4, 4)
    with GPipe(model, [2, 4], chunks=2, checkpoint="always") as pipe:
        pipe.step_timeout = 300
        if call == "forward":
            pipe.eval()
            with torch.no_grad():
                expected = torch.cat([model(piece) for piece in input.tensor_split(2)])
                for _ in range(2):
                    assert torch.equal(pipe(input), expected)
            return
        for _ in range(2):
            pipe(input).pow(2).sum().backward()
        assert all(leaf.grad is not None for leaf in pipe.parameters())
