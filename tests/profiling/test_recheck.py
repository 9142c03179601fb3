"""The check of cached times. The tests set how long a run takes; no clock is involved."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.profiling import measurements
from gpipe_cli.profiling.layer_times import forward_times
from gpipe_cli.profiling.measurements import load_per_core, recheck_layers, recheck_phases
from gpipe_cli.profiling.records import Sample
from gpipe_cli.skip import pop, skippable, stash

SAMPLE = Sample(torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
WITHOUT_LOSS = Sample(torch.zeros(2, 4))
CPU = torch.device("cpu")


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def running(monkeypatch: pytest.MonkeyPatch, *runs: list[float]) -> None:
    monkeypatch.setattr(measurements, "forward_times", lambda *_: list(runs))


def test_one_disturbed_run_does_not_cost_a_good_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, [9.0, 50.0, 1.0], [1.0, 10.5, 1.0], [4.0, 30.0, 1.0])
    drift = recheck_layers(layers(3), SAMPLE, [1.0, 10.0, 1.0])
    assert drift.tolerable and str(drift) == "layer '1' took 1.05 x the cached time"


def test_a_measurement_of_a_loaded_machine_is_found_out_by_its_costliest_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running(monkeypatch, *[[1.0, 10.0, 1.0]] * 3)
    drift = recheck_layers(layers(3), SAMPLE, [1.0, 19.0, 1.0])
    assert not drift.tolerable and str(drift) == "layer '1' took 0.53 x the cached time"
    assert not recheck_layers(layers(3), SAMPLE, [0.0, 0.0, 0.0]).tolerable


def test_of_equal_layers_half_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costliest one of many equal layers is the one that was disturbed most; alone it would never be confirmed."""
    running(monkeypatch, *[[1.0] * 6] * 3)
    drift = recheck_layers(layers(6), WITHOUT_LOSS, [1.0, 1.3, 1.0, 1.0, 1.0, 1.0])
    assert drift.tolerable and drift.what == "layer '1' and 2 more"


def test_the_layer_whose_time_contains_the_loss_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, *[[1.0, 10.0]] * 3)
    assert recheck_layers(layers(2), SAMPLE, [1.0, 20.0]).tolerable
    assert not recheck_layers(layers(2), WITHOUT_LOSS, [1.0, 20.0]).tolerable
    assert recheck_layers(layers(1), SAMPLE, [1.0]).what == "layer '0'"


@pytest.mark.parametrize(
    ("taken", "ratio", "runs"), [([3.1], 3.1 / 3, 1), ([9.0, 3.0], 1.0, 2), ([6.0, 4.5, 9.0], 1.5, 3)]
)
def test_a_pipeline_is_run_again_until_it_agrees_three_times_at_most(
    monkeypatch: pytest.MonkeyPatch, taken: list[float], ratio: float, runs: int
) -> None:
    now = iter(taken)
    monkeypatch.setattr(measurements, "measure_forward_backward", lambda *_, **__: (1.0, next(now) - 1.0))
    drift = recheck_phases(layers(2), SAMPLE, [1, 1], [CPU] * 2, 4, cached_ms=3.0, cores=2)
    assert drift.ratio == pytest.approx(ratio) and drift.what == "a pipeline of 2 partitions"
    assert not list(now) and len(taken) == runs


@skippable(stash=["x"])
class Keep(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("x", input)
        return input * 1


@skippable(pop=["x"])
class Add(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return input + (yield pop("x"))


def test_any_model_can_be_checked_and_is_left_as_it_was() -> None:
    model = nn.Sequential(Keep(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), Add()).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    runs = forward_times(model, SAMPLE, 3)
    assert [len(run) for run in runs] == [5, 5, 5] and min(map(min, runs)) > 0
    drift = recheck_phases(model, SAMPLE, [3, 2], [CPU] * 2, 2, 1.0, cores=2)
    assert drift.ratio > 0
    assert torch.equal(generator, torch.get_rng_state()) and not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_gradients_of_the_caller_are_not_thrown_away() -> None:
    model = layers(2)
    model(SAMPLE.input).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        recheck_layers(model, SAMPLE, [1.0, 1.0])
    assert model[0].weight.grad is not None


def test_the_load_is_told_per_core_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert load_per_core() == 1.5

    def unknown() -> Any:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert load_per_core() is None
