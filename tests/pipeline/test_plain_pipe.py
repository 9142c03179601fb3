"""The reference: one thread, micro-batch by micro-batch, under keys."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli.pipeline.gpipe import plain_pipe


def gradients(pipe: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]


def test_loss_and_gradients_of_uneven_micro_batches_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    input, target = torch.randn(10, 4).double(), torch.randint(3, (10,))
    loss = plain_pipe(model, chunks=4).step(input, target, functional.cross_entropy)
    by_chunks = gradients(model)
    model.zero_grad()
    whole = functional.cross_entropy(model(input), target)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)
    for mine, plain in zip(by_chunks, gradients(model), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, input: torch.Tensor) -> torch.Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no gradient today")


class FailsInBackward(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Failing.apply(input)


@pytest.mark.parametrize(
    ("layer", "error", "place"),
    [
        (
            nn.Linear(3, 2),
            RuntimeError,
            "in partition 0, layer '1' (Linear), micro-batch 0, action F0.0 (forward)",
        ),
        (
            FailsInBackward(),
            ArithmeticError,
            "in partition 0, layer '1' (FailsInBackward), micro-batch 0, action B0.0 (backward)",
        ),
    ],
)
def test_an_error_says_which_layer_it_comes_from(
    layer: nn.Module, error: type[Exception], place: str
) -> None:
    pipe = plain_pipe(nn.Sequential(nn.Linear(2, 2), layer, nn.Linear(2, 2)), chunks=2)
    with pytest.raises(error) as caught:
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
    assert caught.value.__notes__ == [place]


def test_the_calling_thread_runs_every_layer_and_each_backward_before_the_next_forward() -> None:
    calls: list[tuple[str, threading.Thread]] = []

    class Recording(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, input: torch.Tensor) -> torch.Tensor:
            calls.append(("forward", threading.current_thread()))
            return input.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            calls.append(("backward", threading.current_thread()))
            return gradient

    class Recorder(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Recording.apply(input)

    pipe = plain_pipe(nn.Sequential(nn.Linear(2, 2), Recorder()), chunks=2)
    pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
    assert calls == [("forward", threading.main_thread()), ("backward", threading.main_thread())] * 2


def test_target_and_input_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must agree on the batch size \(target: 3, input: 4"):
        plain_pipe(nn.Sequential(nn.Identity())).step(torch.ones(4, 1), torch.ones(3, 1), functional.mse_loss)


def test_a_loss_of_more_than_one_number_is_refused() -> None:
    pipe = plain_pipe(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"loss_fn must give one number per call, got a tensor of shape \(4"):
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), lambda output, target: output - target)


def test_a_loss_that_begins_to_draw_is_keyed_from_its_first_draw() -> None:
    noise = [0.0]

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output + (torch.rand_like(output) if noise[0] else 0.0), target)

    pipe = plain_pipe(nn.Sequential(nn.Linear(2, 2)), chunks=2)
    batch = torch.ones(4, 2), torch.ones(4, 2)
    pipe.step(*batch, loss_fn, key=1)
    noise[0] = 1.0
    state = torch.get_rng_state()
    assert torch.equal(pipe.step(*batch, loss_fn, key=1), pipe.step(*batch, loss_fn, key=1))
    assert not torch.equal(pipe.step(*batch, loss_fn, key=1), pipe.step(*batch, loss_fn, key=2))
    assert torch.equal(torch.get_rng_state(), state)
