from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.profiling.layer_times import layer_stats, layer_times
from gpipe_cli.profiling.records import FLOPS, FORWARD, LAYERS, MEASURED, Sample
from gpipe_cli.profiling.timeline import IsLate
from gpipe_cli.skip import pop, skippable, stash
from gpipe_cli.torch_internals.dispatch_modes import current_saved_tensors_hooks


def test_every_layer_is_measured_and_counted() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 4, bias=False))
    layers = layer_stats(module, Sample(torch.randn(8, 64)))
    assert [layer.name for layer in layers] == ["0", "1", "2"]
    assert [layer.type for layer in layers] == ["Linear", "ReLU", "Linear"]
    assert [layer.parameters for layer in layers] == [64 * 256 + 256, 0, 1024]
    assert [layer.parameter_bytes for layer in layers] == [4 * (64 * 256 + 256), 0, 4096]
    assert [layer.output_shape for layer in layers] == [((8, 256),), ((8, 256),), ((8, 4),)]
    times = layer_times(module, Sample(torch.randn(8, 64)), runs=1)
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in times)


def test_saved_bytes_count_a_storage_once_and_no_parameters() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Flatten())
    layers = layer_stats(module, Sample(torch.randn(4, 16)))
    # A linear layer keeps its input for the weight's gradient, tanh its output, a view nothing.
    assert [layer.saved_bytes for layer in layers] == [4 * 16 * 4, 4 * 16 * 4, 0]


def test_the_model_its_buffers_its_mode_and_the_generators_stay_as_they_were() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2)
    )
    module.eval()
    module[1].train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    sample = torch.randn(4, 3, 8, 8)
    generator = torch.get_rng_state()
    threads = threading.active_count()
    layer_stats(module, Sample(sample))
    layer_times(module, Sample(sample), runs=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert [layer.training for layer in module] == [False, True, False, False, False]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    assert threading.active_count() == threads


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
        yield stash("skip", input)
        return input * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
        skip = yield pop("skip")
        return input + skip


class Pair(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, input * 2


class Sum(nn.Module):
    def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
        return input[0] + input[1]


def test_skips_tuples_and_integer_inputs_are_profiled() -> None:
    module = nn.Sequential(nn.Embedding(10, 4), Stash(), Pair(), Sum(), nn.Linear(4, 4), Pop())
    sample = Sample(torch.randint(10, (3, 5)))
    layers = layer_stats(module, sample)
    assert len(layers) == len(layer_times(module, sample, runs=1)) == 6
    assert layers[2].output_shape == ((3, 5, 4), (3, 5, 4))


def test_gradients_that_are_there_already_are_refused() -> None:
    """They would be lost, or counted in."""
    module = nn.Sequential(nn.Linear(2, 2))
    module(torch.randn(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        layer_times(module, Sample(torch.randn(1, 2)))


def test_a_frozen_layer_has_no_backward_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    layers = layer_times(module, Sample(torch.randn(3, 4)), runs=1)
    assert layers[0].backward_ms == 0 and layers[1].backward_ms > 0


@pytest.mark.accelerator
def test_on_an_accelerator_layers_are_timed_by_events_and_come_home(accelerators: list[torch.device]) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    layers = layer_times(module, Sample(torch.randn(128, 64)).to(accelerators[0]), runs=1)
    assert layers[0].forward_ms > 0 and layers[2].backward_ms > 0
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


class _Fails(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        raise RuntimeError("this layer fails")


def test_a_layer_that_fails_leaves_no_hooks_on_saved_tensors() -> None:
    with pytest.raises(RuntimeError, match="this layer fails"):
        layer_stats(nn.Sequential(nn.Linear(4, 4), _Fails()), Sample(torch.randn(2, 4)))
    assert current_saved_tensors_hooks() is None


def late_after_calls(calls: int) -> IsLate:
    """A clock that each action of a step moves on."""
    left = iter(range(calls - 1))
    return lambda: next(left, None) is None


def linears(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(first, second, bias=False) for first, second in pairwise(widths)))


def test_what_there_is_no_time_for_is_estimated_from_flops_at_the_pace_of_what_was_measured() -> None:
    """vit_b_16 was measured for 316 seconds where 3 were allowed."""
    module, sample = linears(64, 64, 64, 128), Sample(torch.randn(8, 64))
    # Forward with its copy, twice: then it is late.
    first, second, third = layer_times(module, sample, is_late=late_after_calls(4))
    assert [layer.source for layer in (first, second, third)] == [FORWARD, FORWARD, FLOPS]
    # The backward of the first layer needs the gradient of its weight only, that of the others twice the forward.
    assert first.backward_ms == pytest.approx(first.forward_ms)
    assert second.backward_ms == pytest.approx(2 * second.forward_ms)
    assert third.forward_ms == pytest.approx(first.forward_ms + second.forward_ms)
    assert third.backward_ms == pytest.approx(2 * third.forward_ms)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_layer_longer_than_the_time_is_finished_and_the_only_one_to_run() -> None:
    first, second = layer_times(linears(64, 64, 64), Sample(torch.randn(8, 64)), is_late=lambda: True)
    assert (first.source, second.source) == (FORWARD, FLOPS)
    assert second.forward_ms == pytest.approx(first.forward_ms)


def test_a_step_that_ended_in_time_needs_no_estimate() -> None:
    module, sample = linears(8, 8), Sample(torch.randn(2, 8))
    assert [layer.source for layer in layer_times(module, sample, is_late=late_after_calls(3))] == [MEASURED]


def test_without_flops_to_compare_with_nothing_counts_as_measured() -> None:
    module = nn.Sequential(nn.Identity(), *linears(8, 16))
    layers = layer_times(module, Sample(torch.randn(2, 8)), is_late=lambda: True)
    assert all(layer.is_work for layer in layers) and layers[1].forward_ms == 2 * 2 * 8 * 16


def test_layers_whose_flops_cannot_be_counted_take_as_long_as_the_measured_ones() -> None:
    class ReadsValues(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input * 2 if float(input.sum()) > 0 else input

    module = nn.Sequential(ReadsValues(), ReadsValues())
    first, second = layer_times(module, Sample(torch.randn(2, 8)), is_late=lambda: True)
    assert second.source == LAYERS and second.forward_ms == first.forward_ms
