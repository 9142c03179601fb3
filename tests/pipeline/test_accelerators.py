"""Pipes on accelerators: where layers run, which streams they use, and that the host never waits."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.accelerator import copies, streams
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.schedule import order
from gpipe_cli.schedule.files import FixedOrder
from tests.accelerator.simulator import Simulator

pytestmark = pytest.mark.accelerator
MODES = ["always", "except_last", "never"]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
ROWS = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 4)
    )


def balance(devices: Sequence[object]) -> list[int]:
    return {1: [6], 2: [3, 3], 3: [2, 2, 2], 4: [2, 1, 1, 2]}[len(devices)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 4, generator=generator)


def run(pipe: Pipe, how: str) -> list[Tensor]:
    """Loss and gradients of two mini-batches, on the CPU. All that is queued here is queued on the current streams."""
    input, target = batch()
    # A product, so that the input is the result of a kernel and not of a copy, which may wait on the host.
    input, target = input.to(pipe.input_device) * 1, target.to(pipe.output_device) * 1
    losses = []
    for number in range(2):
        torch.manual_seed(number)
        if how == "step":
            losses.append(pipe.step(input, target, functional.mse_loss))
        else:
            losses.append(functional.mse_loss(pipe(input), target))
            losses[-1].backward()
        input.mul_(0.5)
    return [value.detach().mul(1).cpu() for value in (*losses, *(each.grad for each in pipe.parameters()))]


def expected(how: str) -> list[Tensor]:
    with GPipe(model(), [6], devices=["cpu"], chunks=4) as pipe:
        return run(pipe, how)


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def new_stream(device: torch.device, others: Sequence[torch.Stream]) -> torch.Stream:
    """torch takes streams from a small pool in turn; one that is in use would hide a missing wait."""
    used = {*others, *(stream for pair in copies._copy_streams.values() for stream in pair)}
    return next(stream for stream in iter(lambda: torch.Stream(device), None) if stream not in used)


@contextlib.contextmanager
def side_streams(devices: Sequence[torch.device]) -> Iterator[None]:
    """Streams of the caller, which have nothing queued and wait for what is queued on the others."""
    before = streams.StreamSet.current(devices)
    new = [new_stream(device, before.streams) for device in devices]
    for stream, other in zip(new, before.streams, strict=True):
        stream.wait_stream(other)
    with streams.StreamSet(tuple(new), before.device_index).entered():
        yield
    for stream, other in zip(new, before.streams, strict=True):
        other.wait_stream(stream)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_pipe_may_mix_accelerators_and_cpus(accelerators: list[torch.device], how: str) -> None:
    first, second = accelerators[:2]
    for devices in ([first, "cpu"], ["cpu", first], [first, "cpu", second], ["cpu", second, "cpu"]):
        with GPipe(model(), balance(devices), devices=devices, chunks=4) as pipe:
            assert_equal(run(pipe, how), expected(how))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_cpu_waits_for_what_it_reads(simulated: Simulator, how: str) -> None:
    first, second = simulated.devices[:2]
    for devices in ([first, "cpu"], [first, "cpu", second]):
        with GPipe(model(), balance(devices), devices=devices, chunks=4) as pipe, simulated.asynchronous():
            results = run(pipe, how)
        assert_equal(results, expected(how))


def test_a_cpu_waited_for_only_one_of_two_accelerators(simulated: Simulator) -> None:
    first, second = simulated.devices[:2]

    class Spread(nn.Module):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            far = input.to(second)
            for _ in range(50):
                far = far * 1
            return input * 1, far

    class Joined(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            return inputs[0] + inputs[1]

    layers = nn.Sequential(Spread(), Joined())
    with GPipe(layers, [1, 1], devices=[first, "cpu"], chunks=4) as pipe, torch.no_grad():
        input = batch()[0].to(first)
        with simulated.asynchronous():
            output = pipe(input)
    assert torch.equal(output, batch()[0] * 2)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_the_callers_current_streams_were_ignored(accelerators: list[torch.device], how: str) -> None:
    """Workers used their own current streams, and read an input that the caller's stream had not yet computed."""
    for schedule in SCHEDULES:
        with GPipe(model(), [3, 3], devices=accelerators[:2], chunks=4, schedule=schedule) as pipe:
            with side_streams(accelerators):
                results = run(pipe, how)
            assert_equal(results, expected(how))


@pytest.mark.parametrize("places", [(0, 1), (1, None), (None, 1)])
def test_forward_backward_and_what_precedes_the_pipe_may_use_different_streams(
    accelerators: list[torch.device], places: tuple[int | None, int | None]
) -> None:
    devices = [torch.device("cpu") if place is None else accelerators[place] for place in places]

    def gradients(pipe: GPipe) -> list[Tensor]:
        input, target = batch()
        torch.manual_seed(0)
        with side_streams(accelerators):
            leaf = (input.to(pipe.devices[0]) * 1).requires_grad_()
            input = leaf * 2
            with side_streams(accelerators):
                loss = functional.mse_loss(pipe(input), target.to(pipe.output_device) * 1)
                with side_streams(accelerators):
                    loss.backward()
                    # As autograd promises: what the caller of backward queues next sees the gradients.
                    values = [each.grad * 1 for each in (leaf, *pipe.parameters())]
        return [value.cpu() for value in values]

    with (
        GPipe(model(), [3, 3], devices=devices, chunks=4) as pipe,
        GPipe(model(), [6], devices=["cpu"], chunks=4) as cpu,
    ):
        assert_equal(gradients(pipe), gradients(cpu))


def test_the_gradient_of_an_output_on_another_device_is_awaited(accelerators: list[torch.device]) -> None:
    """Autograd orders all gradients that a function receives with the stream of its first output only."""
    first, second = accelerators[:2]

    class Both(nn.Module):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            return input * 2, input.to(first) * 3

    layers = nn.Sequential(nn.Linear(6, 4), Both())
    pipe = GPipe(layers, [1, 1], devices=[first, second], chunks=2, checkpoint="never")
    with pipe, side_streams(accelerators):
        _, far = pipe(batch()[0].to(first) * 1)
        with side_streams(accelerators):
            (far * 5).sum().backward()
            bias = pipe[0].bias.grad * 1
    assert bias.eq(ROWS * 15).all()


def test_gradients_set_to_zero_before_backward_are_awaited(accelerators: list[torch.device]) -> None:
    """With an output on the CPU, backward runs in the caller's thread and can honor the streams there."""
    with GPipe(model(), [3, 3], devices=[accelerators[1], "cpu"], chunks=2) as pipe:
        input, target = batch()
        functional.mse_loss(pipe(input.to(accelerators[1])), target).backward()
        loss = functional.mse_loss(pipe(input.to(accelerators[1])), target)
        with side_streams(accelerators):
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
            loss.backward()


def test_the_caller_may_write_the_input_while_a_copy_of_it_is_under_way(
    accelerators: list[torch.device],
) -> None:
    """The first partition sent the input itself, and nothing made the caller's stream wait for that copy."""
    with (
        GPipe(
            nn.Sequential(nn.Identity(), nn.Identity()), [1, 1], devices=accelerators[:2], chunks=2
        ) as pipe,
        torch.no_grad(),
    ):
        input = torch.ones(4, 2, device=accelerators[0])
        output = pipe(input)
        input.zero_()
    assert output.cpu().eq(1).all()


class Place(nn.Module):
    """Notes the device of a tensor made by a device type alone, in forward, recompute and backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.places = kind, set[torch.device]()

    def forward(self, input: Tensor) -> Tensor:
        return _Place.apply(input, self)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Place) -> Tensor:
        ctx.layer = layer
        layer.places.add(torch.empty(0, device=layer.kind).device)
        return input * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.places.add(torch.empty(0, device=ctx.layer.kind).device)
        return gradient, None


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_layer_that_names_no_device_index_used_the_first_device(
    accelerators: list[torch.device], schedule: str, how: str
) -> None:
    kind = accelerators[0].type
    places = [Place(kind) for _ in range(4)]
    layers = [nn.Linear(6, 6), places[0], places[1], nn.Linear(6, 6), places[2], places[3], nn.Linear(6, 4)]
    devices = accelerators[1::-1]
    partitions = [2, 1, 2, 2] if schedule == "interleaved" else [3, 4]
    with GPipe(
        nn.Sequential(*layers), partitions, devices=devices, chunks=2, checkpoint="always", schedule=schedule
    ) as pipe:
        run(pipe, how)
        first, second = pipe.devices
    by_layer = [first, second, first, second] if schedule == "interleaved" else [first, first, second, second]
    assert [place.places for place in places] == [{device} for device in by_layer]
    assert torch.accelerator.current_device_index() == 0


def test_one_partition_in_the_calling_thread_runs_on_its_device(accelerators: list[torch.device]) -> None:
    place, device = Place(accelerators[0].type), accelerators[1]
    pipe = plain_pipe(nn.Sequential(nn.Linear(6, 4), place).to(device), chunks=2, device=device)
    run(pipe, "step")
    assert place.places == {device} and torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("how", ["step", "backward"])
def test_interleaved_partitions_may_end_on_any_device(accelerators: list[torch.device], how: str) -> None:
    """With 3 partitions on 2 devices the last one is on the first device, but targets went to the second."""
    with GPipe(model(), [2, 2, 2], devices=accelerators[:2], chunks=4, schedule="interleaved") as pipe:
        assert pipe.output_device == accelerators[0]
        assert pipe(batch()[0].to(accelerators[0])).device == pipe.output_device
        assert_equal(run(pipe, how), expected(how))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_partitions_may_begin_on_any_device(accelerators: list[torch.device], how: str) -> None:
    """Engines put inputs on the first device of the list, where an order from a file may have the last partition."""
    reversed_order = FixedOrder("reversed", tuple(reversed(order("1f1b", 2, 4, 2))))
    with GPipe(model(), [3, 3], devices=accelerators[:2], chunks=4, schedule=reversed_order) as pipe:
        assert (pipe.input_device, pipe.output_device) == (accelerators[1], accelerators[0])
        assert_equal(run(pipe, how), expected(how))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_workers_use_the_callers_autocast_of_any_accelerator(
    accelerators: list[torch.device], how: str
) -> None:
    class Seen(nn.Module):
        dtypes: set[torch.dtype]

        def forward(self, input: Tensor) -> Tensor:
            self.dtypes.add(input.dtype)
            return input

    seen = Seen()
    seen.dtypes = set()
    layers = nn.Sequential(nn.Linear(6, 4), nn.Identity(), seen)
    pipe = GPipe(layers, [2, 1], devices=accelerators[:2], chunks=2, checkpoint="always")
    with pipe, torch.autocast(accelerators[0].type, dtype=torch.bfloat16):
        try:
            torch.ones(1, device=accelerators[0]) * 1
        except NotImplementedError:
            pytest.skip("devices of this type have no autocast")
        run(pipe, how)
    assert seen.dtypes == {torch.bfloat16}


@pytest.mark.parametrize("how", ["step", "backward"])
def test_devices_without_side_streams_copy_on_their_only_one(
    accelerators: list[torch.device], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPS."""
    for module in (streams, copies):
        monkeypatch.setattr(module, "has_side_streams", lambda device: False)
    monkeypatch.setattr(copies, "_copy_streams", {})
    for devices in ([accelerators[0], "cpu"], ["cpu", accelerators[0], accelerators[0]]):
        with GPipe(model(), balance(devices), devices=devices, chunks=4) as pipe:
            assert_equal(run(pipe, how), expected(how))


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_host_waited_for_batch_norm_in_every_micro_batch(simulated: Simulator, checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    with GPipe(layers, [2, 2], devices=simulated.devices[:2], chunks=3, checkpoint=checkpoint) as pipe:
        input, target = torch.randn(9, 8).to(pipe.devices[0]), torch.randn(9, 8).to(pipe.output_device)
        pipe.step(input, target, functional.mse_loss)  # the first step learns what the layers do
        simulated.reset()
        pipe.step(input, target, functional.mse_loss)
        assert simulated.host_syncs() == []


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_host_waits_for_no_device_in_a_step(simulated: Simulator, schedule: str, checkpoint: str) -> None:
    devices = simulated.devices
    with GPipe(
        model(), [2, 1, 1, 2], devices=devices, chunks=4, checkpoint=checkpoint, schedule=schedule
    ) as pipe:
        input, target = batch()
        input, target = input.to(pipe.devices[0]), target.to(pipe.output_device)
        for step in range(3):
            if step == 1:  # the first step learns what the layers do
                simulated.reset()
            pipe.step(input, target, functional.mse_loss)
            functional.mse_loss(pipe(input), target).backward()
        assert simulated.host_syncs() == []


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_what_a_backward_draws_was_not_keyed(simulated: Simulator, how: str) -> None:
    """It runs in autograd's thread of the device, which knew nothing of the worker's key."""

    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = NoisyGradient.apply(super().forward(input))  # type: ignore[no-untyped-call]
            return output

    def gradients(devices: Sequence[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        with GPipe(nn.Sequential(Noisy(6, 6), Noisy(6, 4)), [1, 1], devices=devices, chunks=4) as pipe:
            return run(pipe, how)

    assert_equal(gradients(simulated.devices[:2]), gradients(["cpu", "cpu"]))


SCALE = contextvars.ContextVar("SCALE", default=1.0)


def test_a_recompute_in_backward_did_not_see_context_variables(accelerators: list[torch.device]) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * SCALE.get()

    def gradients(checkpoint: str) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(Scaled(6, 6), Scaled(6, 4))
        with GPipe(layers, [1, 1], devices=(accelerators * 2)[:2], chunks=4, checkpoint=checkpoint) as pipe:
            return run(pipe, "backward")

    before = SCALE.set(3.0)
    try:
        assert_equal(gradients("always"), gradients("never"))
    finally:
        SCALE.reset(before)
