"""OffloadModel: what a plain model computes, to the bit, and the complaints of the original."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.offload import OffloadModel
from gpipe_cli.pipeline.gpipe import plain_pipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(8, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 1),
    )


def rows(count: int = 8) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("slices", [1, 2, 3, 99])
@pytest.mark.parametrize(("checkpoint", "micro_batches"), [(False, 1), (True, 1), (True, 3)])
def test_outputs_and_all_gradients_are_those_of_a_plain_model(
    slices: int, checkpoint: bool, micro_batches: int
) -> None:
    plain, other = model(), model()
    offloaded = OffloadModel(
        other, CPU, num_slices=slices, checkpoint_activation=checkpoint, num_microbatches=micro_batches
    )
    mine, theirs = rows(), rows()
    for step in range(2):  # the second adds to the gradients of the first
        output, expected = offloaded(mine), plain_pipe(plain, chunks=micro_batches)(theirs)
        assert output.shape == (8, 1) and torch.equal(output, expected), step
        output.square().mean().backward()
        expected.square().mean().backward()
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
        for name, parameter in plain.named_parameters():
            gradient = dict(offloaded.named_parameters())[name].grad
            assert gradient is not None and parameter.grad is not None
            if micro_batches == 1:
                assert torch.equal(gradient, parameter.grad), name
            else:  # autograd takes the micro-batches of a plain model from the last to the first
                torch.testing.assert_close(gradient, parameter.grad)
    offloaded.close()


def test_an_optimizer_of_the_user_trains_it() -> None:
    plain, other = model(), model()
    offloaded = OffloadModel(other, CPU, num_slices=3, checkpoint_activation=True)
    for each in (plain, offloaded):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            each(rows()).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert offloaded.state_dict().keys() == plain.state_dict().keys()
    offloaded.close()


def test_dropout_is_the_same_in_forward_and_recomputation() -> None:
    torch.manual_seed(0)
    ones = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5))
    offloaded = OffloadModel(ones, CPU, checkpoint_activation=True, num_microbatches=4)
    input = torch.ones(64, 16, requires_grad=True)
    output = offloaded(input)
    output.sum().backward()
    assert input.grad is not None and torch.equal(output.detach(), input.grad)
    assert 0 < output.count_nonzero() < output.numel()
    offloaded.close()


def test_tuples_cross_slice_boundaries() -> None:
    class Pair(nn.Module):
        def forward(self, input: Any) -> Any:
            first, second = input if isinstance(input, tuple) else (input, input)
            return first * 2, second + 1

    class Join(nn.Module):
        def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
            return input[0] + input[1]

    offloaded = OffloadModel([Pair(), Pair(), Join()], CPU, checkpoint_activation=True)
    input = rows()
    output = offloaded(input)
    assert torch.equal(output, input * 4 + (input + 1 + 1))
    output.sum().backward()
    assert input.grad is not None and torch.equal(input.grad, torch.full_like(input, 5))
    offloaded.close()


def test_autocast_reaches_the_recomputation() -> None:
    autocast: list[bool] = []

    class Look(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            autocast.append(torch.is_autocast_enabled("cpu"))
            return input

    offloaded = OffloadModel(
        nn.Sequential(nn.Linear(6, 6), Look()), CPU, num_slices=2, checkpoint_activation=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = offloaded(rows())
    output.float().sum().backward()
    assert autocast and all(autocast) and output.dtype == torch.bfloat16
    offloaded.close()


def test_a_sum_is_added_up_over_micro_batches() -> None:
    """Gradients were divided by the number of micro-batches, without a word."""
    loss = nn.MSELoss(reduction="sum")
    target = torch.ones_like(model()(rows()).detach())
    offloaded = OffloadModel(model(), CPU, checkpoint_activation=True, num_microbatches=2)
    with pytest.raises(ValueError, match=r"the loss has reduction='sum'.*; call step with reduction='sum'"):
        offloaded.step(rows(), target, loss)
    total = offloaded.step(rows(), target, loss, reduction="sum")
    plain = model()
    expected = loss(plain(rows()), target)
    expected.backward()
    torch.testing.assert_close(total, expected.detach())
    for mine, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    offloaded.close()


def test_weights_are_loaded_where_they_live() -> None:
    offloaded = OffloadModel(model(), CPU)
    state = {name: torch.ones_like(tensor) for name, tensor in model().state_dict().items()}
    before = offloaded(rows())
    offloaded.load_state_dict(state)
    plain = copy.deepcopy(model())
    plain.load_state_dict(state)
    assert torch.equal(offloaded(rows()), plain(rows())) and not torch.equal(before, plain(rows()))
    offloaded.close()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": None}, TypeError, "`model` argument to `OffloadModel` cannot be None."),
        ({"device": None}, TypeError, "`device` argument to `OffloadModel` cannot be None."),
        ({"offload_device": None}, TypeError, "`offload_device` argument to `OffloadModel` cannot be None."),
        ({"model": nn.Linear(1, 1)}, TypeError, "must be of type `nn.Sequential`."),
        ({"offload_device": torch.device("meta")}, TypeError, "must be a CPU"),
        ({"num_slices": 0}, ValueError, "must be at least 1"),
        ({"num_microbatches": 2}, RuntimeError, "only support microbatches with activation checkpointing"),
    ],
)
def test_arguments_are_refused_as_by_the_original(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        OffloadModel(**{"model": model(), "device": CPU, **arguments})


@pytest.mark.parametrize(
    "to_cpu",
    [
        lambda model: model.cpu(),
        lambda model: model.to("cpu"),
        lambda model: model.to(device=CPU, non_blocking=True),
    ],
)
def test_a_model_in_host_memory_can_be_asked_for_on_the_cpu_and_trains_on(to_cpu: Any) -> None:
    """fairscale's own tests compare `offloaded.cpu()` with a plain model; it was refused as a move."""
    sequence = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    sequence[3].weight = sequence[0].weight  # a shared parameter
    plain, offloaded = copy.deepcopy(sequence), OffloadModel(sequence, CPU, CPU, num_slices=2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, offloaded)]
    for _ in range(2):
        for each in (plain, offloaded):
            each(rows()[:, :4]).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert to_cpu(offloaded) is offloaded
        for (name, mine), theirs in zip(
            offloaded.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert mine.device.type == "cpu" and torch.allclose(mine, theirs), name
    offloaded.close()


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
        lambda model: model.to("meta"),
        lambda model: model.half(),
    ],
)
def test_moves_to_other_devices_and_conversions_are_refused(convert: Any) -> None:
    message = "decides where its parameters are"
    with OffloadModel(model(), CPU) as offloaded, pytest.raises(TypeError, match=message):
        convert(offloaded)


def test_keyword_arguments_are_refused() -> None:
    message = r"take no keyword arguments \(given: mask\)"
    with OffloadModel(model(), CPU) as offloaded, pytest.raises(TypeError, match=message):
        offloaded(rows(), mask=rows())
