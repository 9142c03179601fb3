"""Facts of a model that is not run: shapes, bytes and floating-point operations of every layer.

    facts = model_facts(sequence, Sample(input, target, loss))
    facts.layers[3].saved_bytes         # of one micro-batch, as if the layer were alone
    facts.saved_bytes(0, 4)             # of layers 0..3 together, where an output is the next layer's input
    facts.boundary(4)                   # what crosses into layer 4 from those before it
    facts.partition_input(4, 8)         # what a partition of layers 4..7 receives
    facts.flops[3].forward

A copy of the sequence runs with fake tensors, so the original may be on the meta device or larger than memory. The
sample is one micro-batch. Layers run as in a pipe: in train mode, with skips, the loss as part of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.profiling.layers import LayerFacts, Sample, SavedTensors, Shape, frozen_layers
from gpipe_cli.pytree import flatten, map_tensors
from gpipe_cli.sequential import layer_class, layer_names, original_output
from gpipe_cli.sequential.without_storage import clone_with
from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.skip.tracker import use_skip_tracker
from gpipe_cli.torch_internals.attention_flops import ATTENTION_ON_CPU
from gpipe_cli.torch_internals.fake_tensors import NEEDS_VALUES, fake_tensors, fake_twin
from gpipe_cli.torch_internals.tensor_memory import storage_of


@final
@dataclass(frozen=True)
class BoundaryFacts:
    """What one micro-batch carries from one layer to the next: the value, then skips on their way."""

    shapes: tuple[Shape, ...]
    bytes: int


@final
@dataclass(frozen=True)
class LayerFlops:
    """Of one micro-batch."""

    forward: int
    backward: int


@final
@dataclass(frozen=True)
class ModelFacts:
    input: BoundaryFacts
    """What enters the first layer."""
    layers: tuple[LayerFacts, ...]
    flops: tuple[LayerFlops, ...]
    """One per layer, of one micro-batch; none if they were not counted."""
    skips: tuple[SkipFacts, ...]
    storages: tuple[Mapping[int, int], ...]
    """For each layer what it keeps for backward: bytes by a number that tells storages apart."""
    frozen_layers: int = 0
    """How many layers come before the first trained one: a partition of such layers keeps nothing for backward."""

    def saved_bytes(self, begin: int, end: int) -> int:
        """Saved by layers `begin` to `end` (exclusive) for one micro-batch; shared storages count once."""
        together: dict[int, int] = {}
        for storages in self.storages[begin:end]:
            together.update(storages)
        return sum(together.values())

    def recompute_bytes(self, begin: int, end: int) -> int:
        """What a partition keeps of one micro-batch to recompute it: its input, unless it has no backward."""
        return self.partition_input(begin, end).bytes if end > self.frozen_layers else 0

    def boundary(self, layer: int) -> BoundaryFacts:
        """What crosses into `layer` from those before it; `boundary(len(layers))` is the output."""
        return self.partition_input(layer, len(self.layers))

    def partition_input(self, begin: int, end: int) -> BoundaryFacts:
        """What a partition of layers `begin` to `end` (exclusive) receives: skips to later partitions are left out."""
        if begin == 0:
            return self.input
        skips = [skip for skip in self.skips if skip.begin < begin <= skip.end < end]
        before = self.layers[begin - 1]
        return BoundaryFacts(
            (*before.output_shape, *(skip.shape for skip in skips)),
            before.output_bytes + sum(skip.bytes for skip in skips),
        )


@final
@dataclass(frozen=True)
class SkipFacts:
    """A tensor that layer `begin` stashes and layer `end` pops."""

    begin: int
    end: int
    shape: Shape
    bytes: int


def model_facts(module: nn.Sequential, sample: Sample, *, count_flops: bool = True) -> ModelFacts:
    """Run one micro-batch with fake tensors; without FLOPs only its forward, in a third of the time."""
    names = layer_names(module)
    with fake_tensors(), torch.enable_grad():
        clone = clone_with(module, fake_twin).train()
        assert isinstance(clone, nn.Sequential), "a copy is what it was copied from"
        with _flop_counter() if count_flops else nullcontext() as counter:
            total = (lambda: 0) if counter is None else counter.get_total_flops
            run = _FakeRun(clone, names, _FlopsPerLayer(len(clone), total))
            outputs = run.forward(sample)
            if count_flops:
                run.backward(outputs)
            flops = run.flops.finish() if count_flops else ()
    inputs = tensors_of(sample.input)
    return ModelFacts(
        input=BoundaryFacts(
            tuple(tuple(tensor.shape) for tensor in inputs), sum(tensor.nbytes for tensor in inputs)
        ),
        layers=tuple(
            saved.facts(index, names[index], layer)
            for index, (saved, layer) in enumerate(zip(run.saved, module, strict=True))
        ),
        flops=flops,
        skips=tuple(run.skips.popped),
        storages=tuple(saved.storages for saved in run.saved),
        frozen_layers=frozen_layers(module, sample),
    )


@final
class _FakeRun:
    """One micro-batch through a sequence of fake tensors."""

    def __init__(self, module: nn.Sequential, names: Sequence[str], flops: _FlopsPerLayer) -> None:
        self._module, self._names = module, names
        parameters = {storage_of(parameter) for parameter in module.parameters()}
        self.saved = [SavedTensors(parameters) for _ in module]
        self.skips = _RecordedSkips()
        self.flops = flops

    def forward(self, sample: Sample) -> tuple[Tensor, ...]:
        """Return what backward starts from."""
        value: Any = map_tensors(fake_twin, sample.input)
        with use_skip_tracker(self.skips):
            for index, layer in enumerate(self._module):
                value = self._layer(index, layer, value)
                self.flops.ran(index, *tensors_of(value), *self.skips.take_stashed())
        if sample.loss is None or sample.target is None:
            return tensors_of(value)
        output = original_output(self._module, value)
        loss = self.saved[-1].including(sample.loss)(output, map_tensors(fake_twin, sample.target))
        self.flops.ran(len(self._module) - 1)
        return (loss,)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        roots = [root for root in outputs if root.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _layer(self, index: int, layer: nn.Module, value: Any) -> Value:
        self.skips.layer = index
        try:
            with self.saved[index] as saved:
                output = layer(value)
            saved.note_output(output)
            flatten(output, f"output of layer {index}")
            return output
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"layer '{self._names[index]}' ({layer_class(layer)}) looks at the values of its tensors "
                f"({error}), so nothing can be said of it without running it"
            ) from error
        except Exception as error:
            error.add_note(f"in layer '{self._names[index]}' ({layer_class(layer)}), without values")
            raise


@final
@dataclass
class _RecordedSkips:
    """Passes skips from layer to layer, and records which layer stashed and which popped each of them."""

    layer: int = 0
    _stashed: list[Tensor] = field(default_factory=list)
    popped: list[SkipFacts] = field(default_factory=list)
    _values: dict[SkipName, tuple[int, Tensor | None]] = field(default_factory=dict)

    def save(self, name: SkipName, value: Tensor | None) -> None:
        self._values[name] = (self.layer, value)
        if value is not None:
            self._stashed.append(value)

    def load(self, name: SkipName) -> Tensor | None:
        begin, value = self._values.pop(name)
        if value is not None:
            self.popped.append(SkipFacts(begin, self.layer, tuple(value.shape), value.nbytes))
        return value

    def take_stashed(self) -> list[Tensor]:
        """What was stashed since the last call."""
        stashed, self._stashed = self._stashed, []
        return stashed


def _flop_counter() -> FlopCounterMode:
    """torch's own counter, corrected for what it omits or gets wrong."""
    return FlopCounterMode(
        display=False,
        custom_mapping={**ATTENTION_ON_CPU, torch.ops.aten.convolution_backward: _convolution_backward},
    )


def _convolution_backward(
    gradient: Shape,
    input: Shape,
    weight: Shape,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    wanted: Sequence[bool],
    **options: Any,
) -> int:
    """As much as the forward for each of the gradients of input and weight; torch's formula forgets the groups."""
    places = (input if transposed else gradient)[2:]
    return 2 * gradient[0] * prod(places) * prod(weight) * sum(wanted[:2])


@final
class _FlopsPerLayer:
    """Divides what a counter counts among the layers of a forward, and of the backward that follows.

    Autograd, on one thread, runs last what was computed first: it finishes a layer's backward before it starts that of
    the previous layer.
    """

    def __init__(self, layers: int, total: Callable[[], int]) -> None:
        """`total` reads the counter."""
        self._total = total
        self._before = total()
        self._forward = [0] * layers
        self._backward = [0] * layers
        self._current = layers - 1

    def ran(self, layer: int, *outputs: Tensor) -> None:
        """Count everything since the last call as this layer's forward.

        When the gradient of any of its outputs exists, backward has reached the layer. The hooks must be registered
        before the next layer runs: a tensor that it writes in place counts as its own output from then on.
        """
        self._forward[layer] += self._since()
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda gradient: self._enter(layer))  # type: ignore[no-untyped-call]

    def finish(self) -> tuple[LayerFlops, ...]:
        """After the backward."""
        self._enter(0)
        return tuple(map(LayerFlops, self._forward, self._backward))

    def _enter(self, layer: int) -> None:
        self._backward[self._current] += self._since()
        # A layer may return the very tensor it got: then the hooks of both layers run, the earlier layer's first.
        self._current = min(self._current, layer)

    def _since(self) -> int:
        now = self._total()
        counted, self._before = now - self._before, now
        return counted
