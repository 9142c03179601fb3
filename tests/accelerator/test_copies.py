"""Moving tensors between devices; on a machine without accelerators only that nothing happens."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.accelerator.copies import copy_streams, start_copy
from gpipe_cli.accelerator.streams import current_stream
from gpipe_cli.pipeline.gpipe import plain_pipe


def test_on_one_device_tensors_stay_what_they_are() -> None:
    tensors = (torch.ones(2), None)
    shipment = start_copy(tensors, torch.device("cpu"))
    assert shipment.receive() is tensors


def test_between_kinds_of_devices_tensors_are_moved() -> None:
    """The meta device stands for any device without streams."""
    moved, nothing = start_copy((torch.ones(2), None), torch.device("meta")).receive()
    assert moved.is_meta
    assert nothing is None


@pytest.mark.accelerator
def test_a_copy_waited_behind_one_of_the_other_direction(accelerators: list[torch.device]) -> None:
    """All copies from and to a device ran on one stream of that device."""
    first, second, third = accelerators[0], accelerators[1], torch.device("cpu")
    pairs = [(first, second), (second, first), (first, third), (third, first)]
    streams = [stream for pair in pairs for stream in copy_streams(*pair)]
    assert len(set(streams)) == len(streams) == 6
    assert not set(streams) & {current_stream(first), current_stream(second)}


@pytest.mark.accelerator
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("kinds", ["both accelerators", "from accelerator to CPU", "from CPU to accelerator"])
def test_a_pipe_over_accelerators_gives_the_gradients_of_the_plain_sequence(
    accelerators: list[torch.device], kinds: str, checkpoint: str, schedule: str
) -> None:
    torch.manual_seed(0)
    first, last = accelerators[0], accelerators[-1]
    mixed = {"from accelerator to CPU": [first, "cpu"], "from CPU to accelerator": ["cpu", last]}
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    plain = plain_pipe(copy.deepcopy(model), chunks=4)
    input, target = torch.randn(16, 8).double(), torch.randn(16, 4).double()
    with GPipe(
        model,
        [2, 2],
        devices=mixed.get(kinds, [first, last]),
        chunks=4,
        checkpoint=checkpoint,
        schedule=schedule,
    ) as pipe:
        pipe.step_timeout = 120
        pipe.step(input.to(pipe.devices[0]), target.to(pipe.output_device), functional.mse_loss)
        functional.mse_loss(pipe(input.to(pipe.devices[0])), target.to(pipe.output_device)).backward()
    for _ in range(2):
        plain.step(input, target, functional.mse_loss)
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.accelerator
def test_dropout_on_accelerators_is_keyed(accelerators: list[torch.device]) -> None:
    devices = [accelerators[0], accelerators[-1]]
    with GPipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], devices=devices, chunks=4) as pipe:
        input = torch.ones(16, 16, device=pipe.devices[0], requires_grad=True)
        output = pipe(input)
        output.sum().backward()
    assert torch.equal(output.detach().cpu().eq(0), input.grad.cpu().eq(0))
