from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.balance import balance_by_time
from gpipe_cli.balance.time import balance as by_time
from gpipe_cli.balance.time import layer_costs, partition_costs
from gpipe_cli.profiling.cache import ProfileCache
from gpipe_cli.profiling.layers import LayerFacts, LayerProfile, Sample
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
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


def profiled(forward: float, backward: float) -> LayerProfile:
    facts = LayerFacts(0, "", "", 0, 0, 0, (), 0)
    return LayerProfile(facts=facts, forward_ms=forward, backward_ms=backward)


def test_among_equally_good_balances_the_simulated_step_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpipe runs all forwards, then all backwards: the slowest forward and the slowest backward count, not their sum.

    The largest sum is 40 wherever the middle layer goes. In the first partition it makes the slowest forward 28,
    beside a backward of 20; in the second one they are 20 and 22.
    """
    layers = [profiled(20, 10), profiled(8, 2), profiled(10, 20)]
    monkeypatch.setattr(ProfileCache, "times", lambda *_: layers)
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
    layers = [profiled(4, 8)]
    costs = [layer_costs(layers, recomputed) for recomputed in (0, 0.75, 1)]
    assert costs == [[12], [15], [16]]


def test_a_partition_that_recomputes_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [profiled(1, 1) for _ in range(5)]
    monkeypatch.setattr(ProfileCache, "times", lambda *_: layers)
    module = nn.Sequential(*(nn.Identity() for _ in layers))
    sample = Sample(torch.zeros(1, requires_grad=True))
    result = by_time(module, sample, 2, PipelineSpec("gpipe", 2, 8, ("always", "never")))
    assert result.layers == [2, 3]
    assert result.sums == [6, 6] and result.lower_bound == 6
    assert by_time(module, sample, 2, PipelineSpec("gpipe", 2, 8, ("never", "always"))).layers == [3, 2]


def test_layers_before_the_first_trained_one_cost_their_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [profiled(1, 0) for _ in range(6)] + [profiled(1, 1) for _ in range(3)]
    monkeypatch.setattr(ProfileCache, "times", lambda *_: layers)
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


def test_more_partitions_than_layers_and_gradients_already_there_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layers: 1, partitions: 2"):
        balance_by_time(model, torch.rand(4, 2), partitions=2, timeout=0)
    model(torch.rand(4, 2)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by_time(model, torch.rand(4, 2), partitions=1, timeout=0)


def test_keyword_arguments_are_a_sample() -> None:
    task = make("keyword_arguments", 4)
    assert sum(balance_by_time(task.model, task.input, partitions=3, timeout=0)) == len(task.model)
