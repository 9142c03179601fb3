"""Facts of a model that is not run: shapes, bytes and floating-point operations of every layer.

    facts = model_facts(sequence, Sample(input, target, loss))
    facts.layers[3].saved_bytes         # of one micro-batch, as if the layer were alone
    facts.saved_bytes(0, 4)             # of layers 0..3 together, where one's output is the next one's input
    facts.border(4)                     # what crosses into layer 4 from those before it
    facts.arriving(4, 8)                # what a partition of layers 4..7 is sent
    facts.flops[3].forward

The sequence is copied with fake tensors for parameters, so it may be on the meta device and larger than memory,
and is left untouched. The sample is one micro-batch, real or not. Layers run as in a pipe: in train mode, with
skips, the loss part of the last one. A layer that looks at values cannot be judged so and is named in the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.pipeline.pytree import flatten, map_tensors
from gpipe_cli.profiling.flops import FlopsPerLayer, LayerFlops, flop_counter
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.seen import LayerFacts, Seen, Shape
from gpipe_cli.sequential import layer_names, original_output
from gpipe_cli.sequential.meta_clone import clone_with
from gpipe_cli.skip.namespace import SkipName
from gpipe_cli.skip.tracker import use_skip_tracker
from gpipe_cli.torch_internals.fake_tensors import NEEDS_VALUES, fake_tensors, fake_twin
from gpipe_cli.torch_internals.storage import storage_of

__all__ = ["Border", "ModelFacts", "model_facts"]


@final
@dataclass(frozen=True)
class Border:
    """What one micro-batch takes across between two layers: the value, then skips on their way."""

    shapes: tuple[Shape, ...]
    bytes: int


@final
@dataclass(frozen=True)
class ModelFacts:
    input: Border
    """What enters the first layer."""
    layers: tuple[LayerFacts, ...]
    flops: tuple[LayerFlops, ...]
    """One per layer, of one micro-batch; none if they were not counted."""
    skips: tuple[Skip, ...]
    storages: tuple[Mapping[int, int], ...]
    """For each layer what it keeps for backward: bytes by a number that tells storages apart."""

    def saved_bytes(self, begin: int, end: int) -> int:
        """Kept by layers `begin` to `end` (exclusive) for one micro-batch, what they share counted once."""
        together: dict[int, int] = {}
        for storages in self.storages[begin:end]:
            together.update(storages)
        return sum(together.values())

    def border(self, layer: int) -> Border:
        """What crosses into `layer` from those before it; `border(len(layers))` is the output."""
        return self._crossing(layer, len(self.layers))

    def arriving(self, begin: int, end: int) -> Border:
        """What a partition of layers `begin` to `end` (exclusive) is sent: skips that pass by are left out."""
        return self._crossing(begin, end)

    def _crossing(self, begin: int, end: int) -> Border:
        if begin == 0:
            return self.input
        skips = [skip for skip in self.skips if skip.begin < begin <= skip.end < end]
        before = self.layers[begin - 1]
        return Border(
            (*before.output_shape, *(skip.shape for skip in skips)),
            before.output_bytes + sum(skip.bytes for skip in skips),
        )


@final
@dataclass(frozen=True)
class Skip:
    """A tensor that layer `begin` stashes and layer `end` pops."""

    begin: int
    end: int
    shape: Shape
    bytes: int


def model_facts(module: nn.Sequential, sample: Sample, *, count_flops: bool = True) -> ModelFacts:
    """Run one micro-batch forward and backward on paper; only forward, in a third of the time, without FLOPs."""
    names = layer_names(module)
    with fake_tensors(), torch.enable_grad():
        clone = clone_with(module, fake_twin).train()
        assert isinstance(clone, nn.Sequential), "a copy is what it was copied from"
        with flop_counter() if count_flops else nullcontext() as counter:
            total = (lambda: 0) if counter is None else counter.get_total_flops
            run = _Run(clone, names, FlopsPerLayer(len(clone), total))
            outputs = run.forward(sample)
            if count_flops:
                run.backward(outputs)
            flops = run.flops.finish() if count_flops else ()
    entering = tensors_of(sample.input)
    return ModelFacts(
        input=Border(tuple(tuple(one.shape) for one in entering), sum(one.nbytes for one in entering)),
        layers=tuple(
            seen.facts(index, names[index], layer)
            for index, (seen, layer) in enumerate(zip(run.seen, module, strict=True))
        ),
        flops=flops,
        skips=tuple(run.skips.popped),
        storages=tuple(seen.storages for seen in run.seen),
    )


@final
class _Run:
    """One micro-batch through a sequence of fake tensors."""

    def __init__(self, module: nn.Sequential, names: Sequence[str], flops: FlopsPerLayer) -> None:
        self._module, self._names = module, names
        parameters = {storage_of(one) for one in module.parameters()}
        self.seen = [Seen(parameters) for _ in module]
        self.skips = _WatchedSkips()
        self.flops = flops

    def forward(self, sample: Sample) -> tuple[Tensor, ...]:
        """Gives what backward begins with."""
        value: Any = _faked(sample.input)
        with use_skip_tracker(self.skips):
            for index, layer in enumerate(self._module):
                value = self._layer(index, layer, value)
                self.flops.ran(index, *tensors_of(value), *self.skips.of_layer())
        if sample.loss is None or sample.target is None:
            return tensors_of(value)
        output = original_output(self._module, value)
        loss = self.seen[-1].watching(sample.loss)(output, _faked(sample.target))
        self.flops.ran(len(self._module) - 1)
        return (loss,)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        roots = [root for root in outputs if root.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _layer(self, index: int, layer: nn.Module, value: Any) -> Value:
        self.skips.layer = index
        try:
            with self.seen[index] as seen:
                output = layer(value)
            seen.look_at(output)
            flatten(output, f"output of layer {index}")
            return output
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"layer '{self._names[index]}' ({type(layer).__name__}) looks at the values of its tensors "
                f"({error}), so nothing can be said of it without running it"
            ) from error
        except Exception as error:
            error.add_note(f"in layer '{self._names[index]}' ({type(layer).__name__}), without values")
            raise


@final
@dataclass
class _WatchedSkips:
    """Hands skips from layer to layer and remembers who stashed and who popped."""

    layer: int = 0
    _stashed: list[Tensor] = field(default_factory=list)
    popped: list[Skip] = field(default_factory=list)
    _values: dict[SkipName, tuple[int, Tensor | None]] = field(default_factory=dict)

    def save(self, name: SkipName, value: Tensor | None) -> None:
        self._values[name] = (self.layer, value)
        if value is not None:
            self._stashed.append(value)

    def load(self, name: SkipName) -> Tensor | None:
        begin, value = self._values.pop(name)
        if value is not None:
            self.popped.append(Skip(begin, self.layer, tuple(value.shape), value.nbytes))
        return value

    def of_layer(self) -> list[Tensor]:
        """What was stashed since this was asked last."""
        stashed, self._stashed = self._stashed, []
        return stashed


def _faked(value: Value) -> Value:
    return map_tensors(fake_twin, value)
