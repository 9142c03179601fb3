from __future__ import annotations

import time
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.balance import balance_by_time
from gpipe_cli.balance.time import balance as by_time
from gpipe_cli.balance.time import layer_costs, partition_costs
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling import profile_cache
from gpipe_cli.profiling.profile_cache import ProfileCache
from gpipe_cli.profiling.records import FLOPS, FORWARD, LayerTimes, Sample
from gpipe_cli.schedule.spec import PipelineSpec
from tests.distributed.tasks import make


class Slow(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        time.sleep(0.01)
        return input * 1


def test_time_gives_slow_layers_a_partition_of_their_own() -> None:
    module = nn.Sequential(nn.Identity(), nn.Identity(), Slow(), Slow(), nn.Identity())
    balanced = by_time(module, Sample(torch.randn(2, 2, requires_grad=True)), 2, seconds=0)
    assert balanced.layers == [3, 2]
    assert balanced.unit == "ms" and balanced.sums[0] > 9


def test_among_equally_good_balances_the_simulated_step_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpipe runs all forwards, then all backwards: the slowest forward and the slowest backward count, not their sum.

    The largest sum is 40 wherever the middle layer goes. In the first partition it makes the slowest forward 28,
    beside a backward of 20; in the second one they are 20 and 22.
    """
    layers = [LayerTimes(20, 10), LayerTimes(8, 2), LayerTimes(10, 20)]
    monkeypatch.setattr(ProfileCache, "stored_times", lambda *_: layers)
    module, sample = nn.Sequential(*(nn.Identity() for _ in layers)), Sample(torch.zeros(1))
    result = by_time(module, sample, 2, PipelineSpec("gpipe", 2, 8))
    assert result.layers == [1, 2]
    assert result.largest == result.lower_bound == 40
    steps = {
        balance: PipelineSpec("gpipe", 2, 8).simulate(partition_costs(layers, balance)).step
        for balance in ((1, 2), (2, 1))
    }
    assert steps[1, 2] < steps[2, 1]


def test_recomputation_counts_where_the_checkpoint_mode_asks_for_it() -> None:
    layers = [LayerTimes(4, 8)]
    costs = [layer_costs(layers, recomputed) for recomputed in (0, 0.75, 1)]
    assert costs == [[12], [15], [16]]


def test_a_partition_that_recomputes_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LayerTimes(1, 1) for _ in range(5)]
    monkeypatch.setattr(ProfileCache, "stored_times", lambda *_: layers)
    module = nn.Sequential(*(nn.Identity() for _ in layers))
    sample = Sample(torch.zeros(1, requires_grad=True))
    result = by_time(module, sample, 2, PipelineSpec("gpipe", 2, 8, ("always", "never")))
    assert result.layers == [2, 3]
    assert result.sums == [6, 6] and result.lower_bound == 6
    assert by_time(module, sample, 2, PipelineSpec("gpipe", 2, 8, ("never", "always"))).layers == [3, 2]


def test_layers_before_the_first_trained_one_cost_their_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LayerTimes(1, 0) for _ in range(6)] + [LayerTimes(1, 1) for _ in range(3)]
    monkeypatch.setattr(ProfileCache, "stored_times", lambda *_: layers)
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in layers))
    module[:6].requires_grad_(False)
    result = by_time(module, Sample(torch.zeros(1)), 2, PipelineSpec("gpipe", 2, 8, "always"))
    # The second partition recomputes and runs backward: 3 x (1 + 1 + 1) ms. A frozen layer in it would be recomputed.
    assert result.layers == [6, 3] and result.sums == [6, 9]
    assert result.largest == result.lower_bound
    first, second = partition_costs(layers, [6, 3], frozen=6)
    assert (first.backward, first.recompute) == (0, 0) and (second.backward, second.recompute) == (3, 3)
    first, second = partition_costs(layers, [5, 4], frozen=6)
    assert first.recompute == 0 and second.recompute == 4


class ReadsValues(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2 if float(input.sum()) > 0 else input


def widths(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(first, second) for first, second in pairwise(widths)))


@pytest.mark.parametrize(("trained", "unit"), [(None, "ms"), (160, "ms"), (159, "FLOPs"), (0, "FLOPs")])
def test_a_run_too_short_to_gain_from_a_measurement_is_balanced_by_flops(
    trained: int | None, unit: str
) -> None:
    profiles = ProfileCache(None)
    module, sample = widths(8, 8, 8, 8, 32, 32), Sample(torch.ones(2, 8))
    result = by_time(
        module, sample, 2, None, None, profiles, 0.0, measure="auto", trained_micro_batches=trained
    )
    assert result.unit == unit
    assert ("too short" in profiles.origin) == (unit == "FLOPs")
    if unit == "FLOPs":  # 2 x 2 x 8 x 8 of a forward, and twice that of a backward that needs both gradients
        assert result.costs[1] == 256 * 3 and result.layers == [4, 1]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_without_values_is_balanced_by_flops_unless_it_must_be_measured() -> None:
    profiles = ProfileCache(None)
    with torch.device("meta"):
        module = widths(8, 8, 8, 8, 32, 32)
    sample = Sample(torch.ones(2, 8))
    assert by_time(module, sample, 2, profiles=profiles, measure="auto").layers == [4, 1]
    assert "this process has no values of the parameters; balance.measure=always" in profiles.origin
    with pytest.raises(ConfigError, match="nothing is run here"):
        by_time(module, sample, 2)


def test_layers_whose_flops_cannot_be_counted_cost_the_same() -> None:
    profiles = ProfileCache(None)
    module = nn.Sequential(*(ReadsValues() for _ in range(6)))
    result = by_time(
        module, Sample(torch.ones(2)), 2, profiles=profiles, measure="auto", trained_micro_batches=3
    )
    assert result.layers == [3, 3] and result.unit == "layers"
    assert "their FLOPs cannot be counted" in profiles.origin


def test_a_model_too_large_to_measure_on_one_device_is_balanced_by_flops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(profile_cache, "layer_times", fails)
    profiles, sample = ProfileCache(None), Sample(torch.ones(2, 8))
    result = by_time(widths(8, 8, 8, 8, 32, 32), sample, 2, profiles=profiles, measure="auto")
    assert result.layers == [4, 1] and "does not fit on one device" in profiles.origin
    with pytest.raises(torch.OutOfMemoryError):
        by_time(widths(8, 8, 8), sample, 2)


def test_another_way_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"balance\.measure=once: must be auto or always"):
        by_time(widths(8, 8, 8), Sample(torch.ones(2, 8)), 2, measure="once")


def test_keyword_arguments_are_a_sample() -> None:
    task = make("keyword_arguments", 4)
    assert sum(balance_by_time(task.model, task.input, partitions=3, timeout=0)) == len(task.model)


def test_the_time_to_measure_holds_for_a_model_of_any_size_and_the_log_says_what_was_estimated() -> None:
    """At least five runs of all layers took place, however long one took."""
    clock = iter(range(100))
    profiles = ProfileCache(None, clock=lambda: next(clock))
    result = by_time(widths(*[8] * 9), Sample(torch.ones(2, 8)), 2, profiles=profiles, seconds=6)
    assert result.unit == "ms"
    sources = [layer.source for layer in result.phases]
    assert sources[0] == FORWARD and sources[-1] == FLOPS and sources == sorted(sources, reverse=True)
    layers = f"the backward of layers 0-{sources.count(FORWARD) - 1} and layers {sources.count(FORWARD)}-7"
    assert (
        f"the time did not suffice, so {layers} estimated from FLOPs; the rest measured in" in profiles.origin
    )
    assert next(clock) < 12


def test_the_time_to_measure_includes_confirming_earlier_times(tmp_path: Path) -> None:
    module, sample = widths(8, 8, 8), Sample(torch.ones(2, 8))
    by_time(module, sample, 2, profiles=ProfileCache(tmp_path, clock=lambda: 0), seconds=6)
    late = ProfileCache(tmp_path, clock=count(0, 100).__next__)
    by_time(module, sample, 2, profiles=late, seconds=6)
    assert "reused unchecked, since there was no time" in late.origin
