"""The examples of torchgpipe's guides, as they stand there but for the package's name, on a machine without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli import GPipe, is_recomputing, register_layer_logging_hooks
from gpipe_cli.balance import balance_by_size, balance_by_time
from gpipe_cli.vision import torchvision


def linear_layers(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def test_applying_gpipe_and_moving_input_and_target() -> None:
    a, b, c, d = linear_layers(4)
    data_loader = [(torch.rand(16, 4), torch.randint(4, (16,))) for _ in range(2)]

    model = nn.Sequential(a, b, c, d)
    model = GPipe(model, balance=[1, 1, 1, 1], chunks=8)
    in_device = model.devices[0]
    out_device = model.devices[-1]
    for input, target in data_loader:
        input = input.to(in_device, non_blocking=True)
        target = target.to(out_device, non_blocking=True)
        output = model(input)
        loss = F.cross_entropy(output, target)
        loss.backward()

    plain = nn.Sequential(a, b, c, d)
    gradients = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    for input, target in data_loader:
        F.cross_entropy(plain(input), target).backward()
    for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    model.close()


@pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
def test_automatic_balancing(balance_by: Callable[..., list[int]]) -> None:
    model = nn.Sequential(*linear_layers(6))
    sample = torch.rand(128, 4)
    balance = balance_by(model, sample, partitions=4)

    assert len(balance) == 4 and sum(balance) == 6 and min(balance) >= 1
    with GPipe(model, balance, chunks=8) as pipe:
        pipe(sample).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_torchvisions_models_are_not_sequential() -> None:
    model = torchvision.models.resnet18()
    with pytest.raises(TypeError, match="non-sequential module cannot be partitioned"):
        GPipe(model, balance=[1], chunks=1)


class Layer1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer1(input), input


class Layer2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer2 = nn.Linear(4, 4)

    def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        input, skip = input_and_skip
        return self.layer2(input), skip


class Layer3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer3 = nn.Linear(4, 4)

    def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> Tensor:
        input, skip = input_and_skip
        return self.layer3(input) + skip


def test_a_skip_connection_as_a_tuple() -> None:
    sequential = nn.Sequential(Layer1(), Layer2(), Layer3())
    input = torch.rand(16, 4)
    expected = sequential(input)
    with GPipe(sequential, balance=[1, 1, 1], chunks=8) as model:
        torch.testing.assert_close(model(input), expected)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0

    def forward(self, input: Tensor) -> Tensor:
        if not is_recomputing():
            self.counter += 1
        return input


def test_detecting_recomputation() -> None:
    counter = Counter()
    with GPipe(nn.Sequential(nn.Linear(4, 4), counter), [1, 1], chunks=8, checkpoint="always") as model:
        model(torch.rand(16, 4)).sum().backward()
    assert counter.counter == 8


def test_the_complete_training_script_with_layer_logging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gpipe_cli")
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    model = GPipe(model, balance=[2, 2, 1], chunks=4)
    hooks = register_layer_logging_hooks(model.partitions)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    inputs = torch.randn(32, 100)
    targets = torch.randint(0, 10, (32,))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for hook in hooks:
        hook.remove()
    model.close()

    assert losses == sorted(losses, reverse=True)
    lines = [record.getMessage() for record in caplog.records]
    assert "Micro-batch 0 (partition 1): checkpoint_stop=3, using_checkpointing=True" in lines
    assert "Executing layer '2' in partition 1: Linear [micro-batch 3]" in lines
    forward = [line for line in lines if line.startswith("Executing") and not line.endswith("recompute]")]
    assert len(forward) == 10 * 4 * 5
