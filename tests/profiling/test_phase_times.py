from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.profiling.layer_times import layer_times
from gpipe_cli.profiling.phase_times import MeasuredPipeline, PhaseTimes, StepTimes, spread_of
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.action import Kind
from gpipe_cli.schedule.spec import PipelineSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("partitions", [1, 2])
def test_every_phase_of_a_pipeline_is_measured_and_the_model_left_as_it_was(partitions: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    sample = Sample(torch.randn(4, 8), torch.randn(4, 4), functional.mse_loss)
    torch.set_rng_state(generator)

    phases = MeasuredPipeline(
        model, sample, [4 // partitions] * partitions, [CPU] * partitions, chunks=4
    ).phase_times()

    checkpointed = (phases.checkpointed_forward, phases.recompute, phases.checkpointed_backward)
    assert min(phases.forward, phases.backward, *checkpointed) > 0
    assert phases.input_grad + phases.weight_grad > 0
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())


def test_time_between_the_actions_is_told_as_a_multiple_of_what_the_simulator_knows() -> None:
    pieces = {
        (partition, *what): duration
        for partition in range(2)
        for what, duration in {
            ("forward", Kind.FORWARD): 10.0,
            ("recompute", Kind.BACKWARD): 10.0,
            ("backward", Kind.BACKWARD): 20.0,
        }.items()
    }

    # One worker after the other, for want of a second core: 2 micro-batches x 2 partitions x 40.
    alone = StepTimes(PipelineSpec("1f1b", 2, 2, "always", cores=1), step=200.0, spread=0.0, pieces=pieces)

    assert alone.excess() == pytest.approx(200 / 160)
    assert alone.sum("backward") == 40 and alone.sum("backward", first=1) == 20


def test_the_spread_of_steps_is_that_of_their_middle_half() -> None:
    assert spread_of([10.0, 9.0, 11.0, 10.0, 500.0]) == pytest.approx(0.1)
    assert spread_of([10.0]) == math.inf, "one step says nothing of its spread"


def test_workers_that_seem_to_do_less_work_than_one_are_as_uncertain_as_that() -> None:
    """While one worker was measured, the machine was busy: two then promised 27.71 times its speed."""
    alone = PhaseTimes(30.0, 60.0, 30.0, 30.0, 60.0, 0.5, 0.5, 0.02)
    together = PhaseTimes(10.0, 20.0, 10.0, 10.0, 20.0, 0.4, 0.7, 0.04)
    assert together.no_quicker_than(alone) == PhaseTimes(30.0, 60.0, 30.0, 30.0, 60.0, 0.4, 0.7, 2.0)
    assert alone.no_quicker_than(together) is alone


@pytest.mark.accelerator
def test_a_pipeline_over_several_accelerators_could_not_be_measured(accelerators: list[torch.device]) -> None:
    """The target was where the first partition is, and the loss where the last one is."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sample = Sample(torch.randn(4, 8), torch.randn(4, 4), functional.mse_loss).to(accelerators[0])
    phases = MeasuredPipeline(model, sample, [1, 1], accelerators[:2], chunks=4).phase_times()
    assert min(phases.forward, phases.backward, phases.recompute) > 0
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.accelerator
def test_the_time_of_a_step_is_taken_when_its_devices_are_done(simulated: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sample = Sample(torch.randn(4, 8), torch.randn(4, 4), functional.mse_loss).to(simulated.devices[0])
    simulated.reset()
    MeasuredPipeline(model, sample, [1, 1], simulated.devices[:2], chunks=4).phase_times(split=False)
    waits = [sync for sync in simulated.host_syncs() if "phase_times.py" in sync]
    # Two schedules of three steps, each with two devices.
    assert len(waits) >= 2 * 3 * 2


class _NotesThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def forward(self, input: Tensor) -> Tensor:
        self.threads.add(threading.get_ident())
        return input


def test_one_partition_runs_in_the_calling_thread_as_engine_single_does() -> None:
    """A second thread has a second team of OpenMP threads, beside which small operators take several times as long."""
    layer = _NotesThread()
    model = nn.Sequential(nn.Linear(8, 8), layer)
    sample = Sample(torch.randn(4, 8), torch.randn(4, 8), functional.mse_loss)
    MeasuredPipeline(model, sample, [2], [CPU], chunks=2).phase_times()
    layer_times(model, sample, runs=1)
    assert layer.threads == {threading.get_ident()}
