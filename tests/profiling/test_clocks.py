"""Times of a device are taken from the host's clock only when the device has nothing left to run."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.accelerator import streams
from gpipe_cli.plan import measured
from gpipe_cli.profiling import phase_times, timeline
from gpipe_cli.profiling.records import Sample
from gpipe_cli.profiling.timeline import ActionRecorder
from tests.accelerator.simulator import Simulator

pytestmark = pytest.mark.accelerator


@pytest.fixture
def idle_when_read(
    simulated: Simulator, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType], list[bool]]:
    """Record, whenever a module reads the clock from now on, whether the host has waited for all devices."""

    def watch(module: ModuleType) -> list[bool]:
        for device in simulated.devices:
            torch.accelerator.synchronize(device)
        idle: list[bool] = []

        def perf_counter() -> float:
            idle.append(simulated.is_idle())
            return time.perf_counter()

        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
        return idle

    return watch


Watch = Callable[[ModuleType], list[bool]]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def test_phase_times(simulated: Simulator, idle_when_read: Watch) -> None:
    sample = Sample(torch.randn(4, 8), torch.randn(4, 4), functional.mse_loss).to(simulated.devices[0])
    idle = idle_when_read(phase_times)
    phase_times.MeasuredPipeline(model(), sample, [1, 1], simulated.devices[:2], chunks=4).phase_times(
        split=False
    )
    assert len(idle) > 6 and all(idle)


def test_steps_of_a_plan(simulated: Simulator, idle_when_read: Watch) -> None:
    devices, module = simulated.devices[:2], model()
    with GPipe(module, [1, 1], devices=devices, chunks=2) as pipe:
        batch = torch.randn(4, 8).pin_memory(), torch.randn(4, 4)
        idle = idle_when_read(measured)
        with torch.Stream(devices[0]):
            torch.ones(8, device=devices[0])
        measured._step(pipe, module, batch, functional.mse_loss, devices)
    assert idle == [True, True]


def test_repeated_work(simulated: Simulator, idle_when_read: Watch) -> None:
    tensor = torch.zeros(8, device=simulated.devices[0])
    idle = idle_when_read(streams)
    streams.median_seconds(lambda: tensor.add_(1), simulated.devices[:1], repeats=2)
    assert idle == [True] * 4


def test_the_origin_and_the_end_of_recorded_actions(simulated: Simulator, idle_when_read: Watch) -> None:
    with GPipe(model(), [1, 1], devices=simulated.devices[:2], chunks=2) as pipe:
        recorder = ActionRecorder(pipe.devices)
        pipe.recorder = recorder
        input = torch.randn(4, 8).to(pipe.devices[0])
        target = torch.randn(4, 4).to(pipe.output_device)
        pipe.step(input, target, functional.mse_loss)
        assert not simulated.is_idle()
        assert recorder.spans() and simulated.is_idle()
        pipe.step(input, target, functional.mse_loss)
        idle = idle_when_read(timeline)
        pipe.step(input, target, functional.mse_loss)
        recorder.clear()
        assert idle == [True]
