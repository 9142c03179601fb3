from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_cli.engines.collectives import Collectives
from gpipe_cli.engines.parameters import EngineParameters
from gpipe_cli.engines.protocol import BatchResult
from gpipe_cli.engines.update import Update, global_norm, norms_of
from gpipe_cli.errors import NumericError

CPU = torch.device("cpu")
ALONE = Collectives.alone(nn.Sequential(), CPU)


def parameters(*gradients: list[float]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return made


def update(of: list[nn.Parameter], *, clip: float | None = None, fp16: bool = False) -> Update:
    model = EngineParameters(nn.ParameterList(of), partial(torch.optim.SGD, lr=99.0))
    return Update(model, clip_grad_norm=clip, scale_loss=fp16, device=CPU, collectives=ALONE)


def apply(updating: Update, *, loss: float, lr: float) -> BatchResult:
    gradients = [parameter.grad for parameter in updating._parameters.trained]
    updating.begin(lr, 0)
    for parameter, gradient in zip(updating._parameters.trained, gradients, strict=True):
        parameter.grad = gradient
    return updating.apply(BatchResult(loss, 1, {}, 1.0), updating.norms())


def test_the_rate_of_the_step_is_the_one_given() -> None:
    (only,) = parameters([0.5])
    facts = apply(update([only]), loss=1.0, lr=0.1)
    assert torch.equal(only.detach(), torch.tensor([1 - 0.1 * 0.5]))
    assert (facts.grad_norm, facts.skipped) == (0.5, False)


def test_gradients_are_forgotten_before_a_step() -> None:
    (only,) = parameters([0.5])
    update([only]).begin(0.1, 0)
    assert only.grad is None


values = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5)


@given(st.lists(values, min_size=1, max_size=4), st.floats(1e-3, 1e3))
def test_clipping_is_that_of_torch(gradients: list[list[float]], largest: float) -> None:
    mine, theirs = parameters(*gradients), parameters(*gradients)
    norm = apply(update(mine, clip=largest), loss=1.0, lr=0.0).grad_norm
    expected = nn.utils.clip_grad_norm_(theirs, largest)
    assert norm == pytest.approx(
        float(expected), rel=1e-6, abs=1e-18
    )  # torch squares in fp32, which underflows
    for parameter, expected in zip(mine, theirs, strict=True):
        assert parameter.grad is not None and expected.grad is not None
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-30)


def test_a_parameter_without_a_gradient_is_no_hindrance_to_clipping() -> None:
    first, second = parameters([3.0, 4.0], [1.0])
    second.grad = None
    assert apply(update([first, second], clip=1.0), loss=1.0, lr=0.1).grad_norm == 5.0
    assert torch.equal(second.detach(), torch.ones(1))


def test_the_norm_does_not_depend_on_where_the_gradients_lie() -> None:
    """A norm of norms per partition differs in its last bits from one norm of all: here it is always the latter."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in (7, 1000, 3, 64)]
    expected = math.sqrt(math.fsum(float(gradient.double().norm()) ** 2 for gradient in gradients))
    assert global_norm(norms_of(gradients)) == global_norm(norms_of(list(gradients)))
    assert global_norm(norms_of(gradients)) == pytest.approx(expected, rel=1e-6)
    assert global_norm(norms_of([])) == 0.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fp16", [False, True])
def test_a_loss_that_is_not_finite_stops_before_anything_changes(loss: float, fp16: bool) -> None:
    (only,) = parameters([0.5])
    with pytest.raises(NumericError, match=r"the loss is (nan|-?inf); try a smaller optimizer.lr"):
        apply(update([only], fp16=fp16), loss=loss, lr=0.1)
    assert torch.equal(only.detach(), torch.ones(1))


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_norm_that_is_not_finite_stops_before_anything_changes(gradient: float, clip: float | None) -> None:
    (only,) = parameters([gradient])
    with pytest.raises(NumericError, match=r"the gradient norm is (nan|inf); try a smaller optimizer.lr"):
        apply(update([only], clip=clip), loss=1.0, lr=0.1)
    assert torch.equal(only.detach(), torch.ones(1))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_scaled_gradients_that_overflowed_leave_the_step_out(clip: float | None) -> None:
    first, second = parameters([math.inf], [1.0])
    updating = update([first, second], clip=clip, fp16=True)
    updating.scaler.scale(torch.ones(()))  # the scale exists from the first loss on
    before = updating.scaler.get_scale()
    facts = apply(updating, loss=1.0, lr=0.1)
    assert (facts.skipped, facts.grad_norm) == (True, None)
    assert torch.equal(first.detach(), torch.ones(1)) and torch.equal(second.detach(), torch.ones(1))
    assert updating.scaler.get_scale() == before / 2


def test_gradients_that_overflow_for_ever_stop_the_run() -> None:
    (only,) = parameters([math.inf])
    updating = update([only], fp16=True)
    updating.scaler.scale(torch.ones(()))
    for _ in range(19):
        assert apply(updating, loss=1.0, lr=0.1).skipped
    with pytest.raises(
        NumericError, match=r"overflowed in 20 steps in a row, down to a loss scale of 0\.0625"
    ):
        apply(updating, loss=1.0, lr=0.1)


def test_an_overflow_now_and_then_is_forgiven() -> None:
    (only,) = parameters([1.0])
    updating = update([only], fp16=True)
    updating.scaler.scale(torch.ones(()))
    for step in range(60):
        assert only.grad is not None
        only.grad.fill_(math.inf if step % 3 else 1.0)
        assert apply(updating, loss=1.0, lr=0.0).skipped is (step % 3 != 0)


def test_scaled_gradients_are_unscaled_before_they_are_clipped() -> None:
    (only,) = parameters([3.0, 4.0])
    updating = update([only], clip=1.0, fp16=True)
    assert only.grad is not None
    only.grad *= float(updating.scaler.scale(torch.ones(())))
    facts = apply(updating, loss=1.0, lr=1.0)
    assert facts.grad_norm == pytest.approx(5.0)
    torch.testing.assert_close(only.detach(), torch.tensor([1 - 0.6, 1 - 0.8]))


def test_a_fused_optimizer_skips_an_update_like_any_other() -> None:
    """The scaler of torch tells it of an overflow; here it is not called at all."""
    results = []
    for fused in (False, True):
        (only,) = parameters([1.0, 2.0])
        model = EngineParameters(nn.ParameterList([only]), partial(torch.optim.AdamW, lr=0.1, fused=fused))
        updating = Update(model, clip_grad_norm=None, scale_loss=True, device=CPU, collectives=ALONE)
        skipped = []
        for step in range(4):
            only.grad = torch.tensor([1.0, 2.0] if step % 2 else [math.inf, 1.0])
            skipped.append(apply(updating, loss=1.0, lr=0.1).skipped)
        assert skipped == [True, False, True, False]
        results.append((only.detach(), model.state(()).optimizer["0/step"]))
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[0][1] == results[1][1] == 2
