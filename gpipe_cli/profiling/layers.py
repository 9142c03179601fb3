"""Time and memory of every layer, measured as the pipeline runs it: each layer is a partition of its own.

So in-place layers, skips, tuples, integer inputs and keyed randomness need nothing special here. All run on one
worker, one after the other, with the thread count of the caller. The model is left as it was found.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved, tensors_of
from gpipe_cli.profiling.left_as_found import left_as_found, staying_at_home
from gpipe_cli.profiling.record import recording
from gpipe_cli.profiling.seen import LayerFacts, Seen
from gpipe_cli.schedule import interleaved
from gpipe_cli.sequential import layer_names
from gpipe_cli.torch_internals.storage import storage_of

WARM_UP = 2
MOST_REPEATS = 50


@final
@dataclass(frozen=True)
class LayerProfile:
    facts: LayerFacts
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        """Of one micro-batch, there and back."""
        return self.forward_ms + self.backward_ms


@final
@dataclass(frozen=True)
class Sample:
    """One micro-batch to measure with; a loss counts as part of the last layer, as in a pipeline."""

    input: Value
    target: Tensor | None = None
    loss: LossFunction | None = None

    def to(self, device: torch.device) -> Sample:
        target = None if self.target is None else self.target.to(device)
        return Sample(moved(self.input, device), target, self.loss)


def profile_layers(
    module: nn.Sequential, sample: Sample, *, seconds: float = 1.0, repeats: int = 5
) -> list[LayerProfile]:
    """Medians of at least `repeats` runs, and of more while `seconds` last."""
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigError("a model without storage cannot be run, so its layers cannot be measured")
    with _layer_by_layer(module, sample) as pipe:
        seen = _look(pipe, sample)
        times = _measure(pipe, sample, seconds, repeats)
    return [
        LayerProfile(
            seen[index].facts(index, name, layer),
            forward_ms=1000 * statistics.median(times[index, "forward"]),
            backward_ms=1000 * statistics.median(times.get((index, "backward"), [0.0])),
        )
        for index, (name, layer) in enumerate(zip(layer_names(module), module, strict=True))
    ]


def forward_times(module: nn.Sequential, sample: Sample, runs: int) -> list[list[float]]:
    """Milliseconds of every layer's forward in each of some runs, without the loss; far quicker than a profile."""
    with _layer_by_layer(module, sample) as pipe:
        _forward(pipe, sample)
        with recording(pipe) as record:
            for _ in range(runs):
                _forward(pipe, sample)
    times: list[list[float]] = [[] for _ in module]
    for piece in record.pieces():
        if piece.phase == "forward":
            times[piece.action.partition].append(1000 * (piece.end - piece.begin))
    return [list(run) for run in zip(*times, strict=True)]


@contextmanager
def _layer_by_layer(module: nn.Sequential, sample: Sample) -> Iterator[GPipe]:
    """A pipe in which each layer is a partition, all on one worker."""
    device = tensors_of(sample.input)[0].device
    with staying_at_home(module), left_as_found(module):
        schedule = interleaved.TRAITS.name
        pipe = GPipe(module, [1] * len(module), devices=[device], checkpoint="never", schedule=schedule)
        with pipe:
            yield pipe


def _forward(pipe: GPipe, sample: Sample) -> Any:
    # The pipe draws its key from torch's default generator, which must be left where it was.
    with torch.random.fork_rng(devices=[]):
        return pipe(sample.input)


def _step(pipe: GPipe, sample: Sample) -> None:
    if sample.loss is not None and sample.target is not None:
        pipe.step(sample.input, sample.target, sample.loss, key=0)
        return
    output = _forward(pipe, sample)
    given = output.values() if isinstance(output, dict) else tensors_of(output)
    outputs = [one for one in given if one.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])


def _measure(pipe: GPipe, sample: Sample, seconds: float, repeats: int) -> dict[tuple[int, str], list[float]]:
    """Seconds of every run, by layer and phase."""
    for _ in range(WARM_UP):
        _step(pipe, sample)
    with recording(pipe) as record:
        deadline = time.perf_counter() + seconds
        for run in range(MOST_REPEATS):
            if run >= repeats and time.perf_counter() > deadline:
                break
            _step(pipe, sample)
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for piece in record.pieces():
        times[piece.action.partition, piece.phase].append(piece.end - piece.begin)
    return times


def _look(pipe: GPipe, sample: Sample) -> list[Seen]:
    """One step with an eye on every layer."""
    parameters = {storage_of(one) for one in pipe.parameters()}
    seen = [Seen(parameters) for _ in pipe]
    handles = []
    for one, layer in zip(seen, pipe, strict=True):
        handles.append(layer.register_forward_pre_hook(partial(_before, one)))
        handles.append(layer.register_forward_hook(partial(_after, one)))
    try:
        _step(pipe, replace(sample, loss=sample.loss and seen[-1].watching(sample.loss)))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _before(seen: Seen, layer: nn.Module, inputs: Any) -> None:
    seen.__enter__()


def _after(seen: Seen, layer: nn.Module, inputs: Any, output: Any) -> None:
    seen.__exit__(None, None, None)
    seen.look_at(output)
