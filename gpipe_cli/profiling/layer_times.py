"""Time and memory of every layer, measured as the pipeline runs it: each layer is a partition of its own.

When the time to measure is up, the layer that runs is finished, and FLOPs stand for what was not measured.

So in-place layers, skips, tuples, integer inputs and keyed randomness need nothing special here. One worker runs all
layers one after the other, with the caller's thread count. The model is unchanged afterwards.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_cli.activity import activity
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import (
    FLOPS,
    FORWARD,
    LAYERS,
    MEASURED,
    LayerStats,
    LayerTimes,
    Sample,
    WatchedLayer,
    frozen_layers,
    has_values,
    preserved,
)
from gpipe_cli.profiling.timeline import IsLate, never_late, run_steps
from gpipe_cli.sequential import layer_names
from gpipe_cli.torch_internals.tensors import storage_of

MAX_RUNS = 50
PHASES = ("forward", "backward")


def layer_stats(module: nn.Sequential, sample: Sample) -> list[LayerStats]:
    """Run one step, in which every layer is watched; nothing of it can be timed."""
    with _layer_by_layer(module, sample) as pipe:
        saved = _saved_tensors(pipe, sample)
    return [
        own.stats(index, name, layer)
        for index, (own, name, layer) in enumerate(zip(saved, layer_names(module), module, strict=True))
    ]


def most_runs(seconds: float) -> int:
    """How often layers run that are measured for so long; without a limit of time a single run must do."""
    return MAX_RUNS if seconds else 1


def layer_times(
    module: nn.Sequential, sample: Sample, *, runs: int = MAX_RUNS, is_late: IsLate = never_late
) -> list[LayerTimes]:
    """Medians of so many runs, or of those that there was time for."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    with _layer_by_layer(module, sample) as pipe:
        steps = run_steps(pipe, partial(_step, pipe, sample), least=runs, is_late=is_late)
    for span in (span for step in steps for span in step.spans):
        if span.phase in PHASES:
            times[span.action.partition, span.phase].append(span.end - span.begin)
    # Medians, because a burst of other work on the machine disturbs some runs, not half of them.
    measured = {place: 1000 * statistics.median(seconds) for place, seconds in times.items()}
    # A layer without a backward still has the action, which takes a moment to do nothing.
    measured |= {(index, "backward"): 0.0 for index in range(frozen_layers(module, sample))}
    if len(measured) == 2 * len(module):
        return [
            LayerTimes(measured[index, "forward"], measured[index, "backward"])
            for index in range(len(module))
        ]
    return _completed(measured, estimated_times(module, sample))


def estimated_times(module: nn.Sequential, sample: Sample) -> list[LayerTimes]:
    """The FLOPs of every layer in place of times; if they cannot be counted, all layers are taken as equal."""
    try:
        operations = model_stats(module, sample).operations
    except Exception:  # noqa: BLE001 - a layer that fails in training too fails there with its place
        return [LayerTimes(1.0, 1.0, LAYERS) for _ in module]
    return [LayerTimes(float(each.forward_flops), float(each.backward_flops), FLOPS) for each in operations]


def _completed(measured: Mapping[tuple[int, str], float], work: Sequence[LayerTimes]) -> list[LayerTimes]:
    """What was measured, and for the rest its work, at the pace of the layer's forward or of all that was measured.

    If nothing that was measured has any work to compare with, all times are work.
    """
    pairs = {
        (index, phase): getattr(each, f"{phase}_ms") for index, each in enumerate(work) for phase in PHASES
    }
    compared = [place for place, ms in measured.items() if ms and pairs[place]]
    if not compared:
        return list(work)
    pace = sum(measured[place] for place in compared) / sum(pairs[place] for place in compared)
    layers = []
    for index, each in enumerate(work):
        forward = measured.get((index, "forward"), pace * each.forward_ms)
        own = forward / each.forward_ms if each.forward_ms else pace
        backward = measured.get((index, "backward"), own * each.backward_ms)
        source = each.source if (index, "forward") not in measured else FORWARD
        if all((index, phase) in measured for phase in PHASES):
            source = MEASURED
        layers.append(LayerTimes(forward, backward, source))
    return layers


def forward_times(
    module: nn.Sequential, sample: Sample, runs: int, is_late: IsLate = never_late
) -> list[list[float]]:
    """Milliseconds of every layer's forward in each run, without the loss; far quicker than `layer_times`.

    When it is late, the only run may lack layers.
    """
    with _layer_by_layer(module, sample) as pipe:
        steps = run_steps(pipe, partial(_forward, pipe, sample), least=runs, warm_up=1, is_late=is_late)
    return [
        [1000 * (span.end - span.begin) for span in step.spans if span.phase == "forward"] for step in steps
    ]


@contextmanager
def _layer_by_layer(module: nn.Sequential, sample: Sample) -> Iterator[Pipe]:
    """A pipe in which each layer is a partition."""
    if not has_values(module):
        raise ConfigError("a model without storage cannot be run, so its layers cannot be measured")
    device = tensors_of(sample.input)[0].device
    activity.now("measuring the layers")
    with preserved(module, device=True):
        move_to_devices([module], [device])
        with plain_pipe(module, [1] * len(module), device=device) as pipe:
            yield pipe


def _forward(pipe: Pipe, sample: Sample) -> Any:
    # The pipe draws its key from torch's default generator, which must be left where it was.
    with torch.random.fork_rng(devices=[]):
        return pipe(sample.input)


def _step(pipe: Pipe, sample: Sample) -> None:
    if sample.loss is not None and sample.target is not None:
        pipe.step(sample.input, sample.target, sample.loss, key=0)
        return
    roots = [tensor for tensor in tensors_of(_forward(pipe, sample)) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _saved_tensors(pipe: Pipe, sample: Sample) -> list[WatchedLayer]:
    """Run one step with hooks on every layer."""

    def before(saved: WatchedLayer, layer: nn.Module, inputs: Any) -> None:
        saved.__enter__()

    def after(saved: WatchedLayer, layer: nn.Module, inputs: Any, output: Any) -> None:
        saved.__exit__(None, None, None)
        saved.note_output(output)

    parameters = {storage_of(parameter) for parameter in pipe.parameters()}
    by_layer = [WatchedLayer(parameters) for _ in pipe]
    handles = []
    for saved, layer in zip(by_layer, pipe, strict=True):
        handles.append(layer.register_forward_pre_hook(partial(before, saved)))
        handles.append(layer.register_forward_hook(partial(after, saved)))
    try:
        _step(pipe, replace(sample, loss=sample.loss and by_layer[-1].including(sample.loss)))
    finally:
        for handle in handles:
            handle.remove()
        for saved in by_layer:
            saved.leave_failed_layer()
    return by_layer
