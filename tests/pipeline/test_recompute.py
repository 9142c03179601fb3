"""Checkpointing: what is computed twice, when, and that nothing but activations changes by it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe, current_microbatch, is_checkpointing, is_recomputing


class Spy(nn.Module):
    """Writes down each time it runs: its name, the micro-batch and the flags."""

    def __init__(self, name: str, log: list[tuple[object, ...]]) -> None:
        super().__init__()
        self.name = name
        self.log = log

    def forward(self, input: Tensor) -> Tensor:
        self.log.append((self.name, current_microbatch().index, is_checkpointing(), is_recomputing()))
        return input * 1


@pytest.mark.parametrize(
    ("checkpoint", "rows", "checkpointed"),
    [
        ("always", 4, 4),
        ("except_last", 4, 3),
        ("never", 4, 0),
        # torchgpipe compared with chunks - 1 and checkpointed both of two micro-batches here.
        ("except_last", 2, 1),
    ],
)
def test_each_mode_recomputes_what_it_says(checkpoint: str, rows: int, checkpointed: int) -> None:
    log: list[tuple[object, ...]] = []
    with GPipe(
        nn.Sequential(Spy("a", log), nn.Linear(1, 1)), [1, 1], chunks=4, checkpoint=checkpoint
    ) as pipe:
        output = pipe(torch.ones(rows, 1, requires_grad=True))
        forward = [("a", index, index < checkpointed, False) for index in range(rows)]
        assert log == forward
        output.sum().backward()
        assert log == forward + [("a", index, False, True) for index in range(checkpointed)]


@pytest.mark.parametrize("switch_off", ["eval", "no_grad"])
def test_nothing_is_recomputed_in_eval_mode_or_without_grad(switch_off: str) -> None:
    log: list[tuple[object, ...]] = []
    with GPipe(nn.Sequential(Spy("a", log), nn.Linear(1, 1)), [1, 1], chunks=2, checkpoint="always") as pipe:
        pipe.train(switch_off != "eval")
        with torch.set_grad_enabled(switch_off != "no_grad"):
            pipe(torch.ones(4, 1))
    assert log == [("a", 0, False, False), ("a", 1, False, False)]


def test_outside_a_pipe_the_flags_are_down() -> None:
    assert (current_microbatch(), is_checkpointing(), is_recomputing()) == (None, False, False)


def test_recomputation_does_not_wait_for_the_gradient() -> None:
    """It is what makes checkpointing cheap in a pipeline: recompute while the partition behind is still
    busy.
    """
    recomputed = threading.Event()

    class Watched(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            if is_recomputing():
                recomputed.set()
            return input * 1

    class WaitInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: Tensor) -> Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            assert recomputed.wait(60), "the partition before this one waited for the gradient"
            return gradient

    class Last(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return WaitInBackward.apply(input)

    with GPipe(nn.Sequential(Watched(), Last()), [1, 1], checkpoint="always") as pipe:
        pipe(torch.ones(2, 2, requires_grad=True)).sum().backward()


def test_the_default_generator_is_where_it_would_be_without_checkpointing() -> None:
    states = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(0)
        with GPipe(
            nn.Sequential(nn.Dropout(), nn.Dropout()), [1, 1], chunks=2, checkpoint=checkpoint
        ) as pipe:
            pipe(torch.ones(4, 4, requires_grad=True)).sum().backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("call", ["step", "forward"])
def test_recomputation_happens_under_the_forwards_autocast(call: str) -> None:
    """fairscale#1199. torchgpipe's workers computed in float32 under the caller's autocast."""
    forwards: list[tuple[torch.dtype, bool]] = []

    class Note(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            output = functional.linear(input, torch.eye(2))
            forwards.append((output.dtype, is_recomputing()))
            return output.float()

    with GPipe(nn.Sequential(nn.Linear(2, 2), Note()), [1, 1], chunks=2, checkpoint="always") as pipe:
        if call == "step":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = pipe(torch.ones(4, 2))
            output.sum().backward()
    assert forwards == [(torch.bfloat16, recomputing) for recomputing in (False, False, True, True)]
    assert pipe[0].weight.grad is not None
