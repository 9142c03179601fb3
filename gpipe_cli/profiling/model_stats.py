"""Statistics of a model that is not run: shapes, bytes and floating-point operations of every layer.

    stats = model_stats(sequence, Sample(input, target, loss))
    stats.layers[3].saved_bytes         # of one micro-batch, as if the layer were alone
    stats.saved_bytes(0, 4)             # of layers 0..3 together, where an output is the next layer's input
    stats.boundary(4)                   # what crosses into layer 4 from those before it
    stats.partition_input(4, 8)         # what a partition of layers 4..7 receives
    stats.operations[3].forward_flops

A copy of the sequence runs with fake tensors, so the original may be on the meta device or larger than memory. The
sample is one micro-batch. Layers run as in a pipe: in train mode, with skips, the loss as part of the last layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.profiling.equal_layers import MAX_EQUAL_LAYERS, LayerSample, layer_key
from gpipe_cli.profiling.records import LayerStats, Sample, Shape, SkipStats, WatchedLayer, frozen_layers
from gpipe_cli.pytree import flatten, map_tensors
from gpipe_cli.sequential import layer_class, layer_names, original_output
from gpipe_cli.sequential.deferred import clone_with
from gpipe_cli.skip.tracker import SkipName, use_skip_tracker
from gpipe_cli.torch_internals.fake_tensors import NEEDS_VALUES, fake_tensors, fake_twin
from gpipe_cli.torch_internals.operation_recorder import KernelCost, OperationRecorder
from gpipe_cli.torch_internals.tensors import storage_of


@final
@dataclass(frozen=True)
class Boundary:
    """What one micro-batch carries from one layer to the next: the value, then skips on their way."""

    shapes: tuple[Shape, ...]
    bytes: int


@final
@dataclass(frozen=True, eq=False)
class LayerOperations:
    """The kernels of one micro-batch, in the order in which they run; layers that do the same share one object."""

    forward: Sequence[KernelCost]
    backward: Sequence[KernelCost]

    @cached_property
    def forward_flops(self) -> int:
        return sum(operation.flops for operation in self.forward)

    @cached_property
    def backward_flops(self) -> int:
        return sum(operation.flops for operation in self.backward)


@final
@dataclass(frozen=True)
class ModelStats:
    input: Boundary
    """What enters the first layer."""
    layers: tuple[LayerStats, ...]
    operations: tuple[LayerOperations, ...]
    """One per layer, of one micro-batch; none if they were not counted."""
    skips: tuple[SkipStats, ...]
    storages: tuple[Mapping[int, int], ...]
    """For each layer what it keeps for backward: bytes by a number that tells storages apart."""
    frozen_layers: int = 0
    """How many layers come before the first trained one: a partition of such layers keeps nothing for backward."""
    kinds: tuple[int, ...] = ()
    """For each layer a number, the same for layers that do the same."""

    def layer_sample(self, room: float = inf) -> LayerSample:
        """The layers to measure: a few of each kind, fewer if a step of them takes more than `room` bytes."""
        crossed = {place for skip in self.skips for place in range(skip.begin + 1, skip.end + 1)}
        most = MAX_EQUAL_LAYERS
        sample = LayerSample.of(self.kinds, crossed, most)
        while most > 1 and self._step_bytes(sample.places) > room:
            most //= 2
            sample = LayerSample.of(self.kinds, crossed, most)
        return sample

    def _step_bytes(self, places: Sequence[int]) -> int:
        """What these layers need for one micro-batch: parameters, gradients, and what they save for backward."""
        return 2 * sum(self.layers[place].parameter_bytes for place in places) + self._saved_bytes(places)

    def _saved_bytes(self, places: Sequence[int]) -> int:
        together: dict[int, int] = {}
        for place in places:
            together.update(self.storages[place])
        return sum(together.values())

    def saved_bytes(self, begin: int, end: int) -> int:
        """Saved by layers `begin` to `end` (exclusive) for one micro-batch; shared storages count once."""
        return self._saved_bytes(range(begin, end))

    def recompute_bytes(self, begin: int, end: int) -> int:
        """What a partition keeps of one micro-batch to recompute it: its input, unless it has no backward."""
        return self.partition_input(begin, end).bytes if end > self.frozen_layers else 0

    def boundary(self, layer: int) -> Boundary:
        """What crosses into `layer` from those before it; `boundary(len(layers))` is the output."""
        return self.partition_input(layer, len(self.layers))

    def partition_input(self, begin: int, end: int) -> Boundary:
        """What a partition of layers `begin` to `end` (exclusive) receives: skips to later partitions are left out."""
        if begin == 0:
            return self.input
        skips = [skip for skip in self.skips if skip.begin < begin <= skip.end < end]
        before = self.layers[begin - 1]
        return Boundary(
            (*before.output_shape, *(skip.shape for skip in skips)),
            before.output_bytes + sum(skip.bytes for skip in skips),
        )


def model_stats(module: nn.Sequential, sample: Sample, *, count_flops: bool = True) -> ModelStats:
    """Run one micro-batch with fake tensors; without FLOPs only its forward, in a third of the time."""
    names = layer_names(module)
    with fake_tensors(), torch.enable_grad():
        run = _FakeRun(module, names, OperationRecorder() if count_flops else None)
        run.run(sample)
    inputs = tensors_of(sample.input)
    return ModelStats(
        input=Boundary(
            tuple(tuple(tensor.shape) for tensor in inputs), sum(tensor.nbytes for tensor in inputs)
        ),
        layers=tuple(
            saved.stats(index, names[index], layer)
            for index, (saved, layer) in enumerate(zip(run.saved, module, strict=True))
        ),
        operations=tuple(run.operations),
        skips=tuple(run.skips.popped),
        storages=tuple(saved.storages for saved in run.saved),
        frozen_layers=frozen_layers(module, sample),
        kinds=tuple(run.kinds),
    )


@final
@dataclass(frozen=True)
class _SeenLayer:
    index: int
    inputs: Sequence[int]
    """The storages of the tensors it got, and of those it returned, by their numbers."""
    outputs: Sequence[int]
    output: Any


@final
class _FakeRun:
    """One micro-batch through a sequence of fake tensors, layer by layer: each starts from leaves of its own.

    A layer that equals an earlier one, and gets an input like it, is not run: what the earlier one did is repeated.
    """

    def __init__(
        self, module: nn.Sequential, names: Sequence[str], recorder: OperationRecorder | None
    ) -> None:
        self._module, self._names, self._recorder = module, names, recorder
        self._seen: dict[Hashable, _SeenLayer] = {}
        # Storages are told apart by their addresses, so none may be freed before the last layer has run.
        self._alive: list[Any] = []
        # A tensor that was returned again by a repeated layer has another number than its address, below zero.
        self._numbers: dict[int, int] = {}
        self._fresh = count(-1, -1)
        self.saved: list[WatchedLayer] = []
        self.operations: list[LayerOperations] = []
        self.kinds: list[int] = []
        self._kinds: dict[Hashable, int] = {}
        self.skips = _RecordedSkips()

    def run(self, sample: Sample) -> None:
        value: Any = map_tensors(fake_twin, sample.input)
        with self._recorder or nullcontext():
            for index, layer in enumerate(self._module):
                is_last = index == len(self._module) - 1
                key = (layer_key(layer, value), is_last)
                self.kinds.append(self._kinds.setdefault(key, index))
                seen = self._seen.get(key)
                # A skip on its way may be in the memory of a tensor that a repeated layer would return again.
                if seen is not None and not self.skips.pending:
                    value = self._repeat(seen, value)
                    continue
                inputs = self._numbers_of(value)
                output = self._run(index, value, sample if is_last else None)
                self._number_storages(self.saved[index])
                if not self.skips.has_any_of(index):
                    self._seen[key] = _SeenLayer(index, inputs, self._numbers_of(output), output)
                value = output

    def _run(self, index: int, value: Any, sample: Sample | None) -> Any:
        """`sample` is given to the last layer, of which the loss is a part."""
        layer = clone_with(self._module[index], fake_twin).train()
        parameters = list(layer.parameters())
        saved = WatchedLayer({storage_of(parameter) for parameter in parameters})
        self.saved.append(saved)
        value = map_tensors(_leaf, value)
        if self._recorder is not None:
            self._recorder.clear()
        output = self._forward(index, layer, saved, value)
        roots = (*tensors_of(output), *self.skips.stashed_by(index))
        if sample is not None and sample.loss is not None and sample.target is not None:
            predicted = original_output(self._module, output, training=True)
            roots = (saved.including(sample.loss)(predicted, map_tensors(fake_twin, sample.target)),)
        self._alive += (layer, roots)
        if self._recorder is not None:
            forward = self._recorder.take(parameters)
            # Every micro-batch but the first adds to the gradients.
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            _backward(roots)
            self.operations.append(LayerOperations(forward, self._recorder.take(parameters)))
        return output

    def _repeat(self, seen: _SeenLayer, value: Any) -> Any:
        """The output of an earlier layer again, whose storages now count as others."""
        now = dict(zip(seen.inputs, self._numbers_of(value), strict=True))
        earlier = self.saved[seen.index]
        for number in (*earlier.storages, *seen.outputs):
            now.setdefault(number, next(self._fresh))
        for tensor, number in zip(tensors_of(seen.output), seen.outputs, strict=True):
            self._numbers[storage_of(tensor)] = now[number]
        storages = {now[number]: size for number, size in earlier.storages.items()}
        self.saved.append(earlier.with_storages(storages))
        if self._recorder is not None:
            self.operations.append(self.operations[seen.index])
        return seen.output

    def _numbers_of(self, value: Any) -> list[int]:
        return [self._number(storage_of(tensor)) for tensor in tensors_of(value)]

    def _number(self, storage: int) -> int:
        return self._numbers.get(storage, storage)

    def _number_storages(self, saved: WatchedLayer) -> None:
        saved.storages = {self._number(storage): size for storage, size in saved.storages.items()}

    def _forward(self, index: int, layer: nn.Module, saved: WatchedLayer, value: Any) -> Value:
        self.skips.layer = index
        try:
            with use_skip_tracker(self.skips), saved:
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


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor of the same values at which backward ends, and on which a layer may still write in place."""
    if not tensor.requires_grad:
        return tensor
    leaf: Tensor = _Identity.apply(tensor.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return leaf


class _Identity(torch.autograd.Function):
    """Inside a Function the output of `detach` is no view, so a layer may write it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None  # nobody needs it further down


def _backward(outputs: Sequence[Tensor]) -> None:
    roots = [root for root in outputs if root.requires_grad]
    if roots:
        gradients = [torch.empty_like(root) for root in roots]
        torch.autograd.backward(roots, gradients, retain_graph=True)


@final
@dataclass
class _RecordedSkips:
    """Passes skips from layer to layer, and records which layer stashed and which popped each of them."""

    layer: int = 0
    _stashed: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _popping: set[int] = field(default_factory=set)
    popped: list[SkipStats] = field(default_factory=list)
    _values: dict[SkipName, tuple[int, Tensor | None]] = field(default_factory=dict)

    def save(self, name: SkipName, value: Tensor | None) -> None:
        self._values[name] = (self.layer, value)
        if value is not None:
            self._stashed[self.layer].append(value)

    def load(self, name: SkipName) -> Tensor | None:
        begin, value = self._values.pop(name)
        self._popping.add(self.layer)
        if value is not None:
            self.popped.append(SkipStats(begin, self.layer, tuple(value.shape), value.nbytes))
        return None if value is None else _leaf(value)

    def stashed_by(self, layer: int) -> Sequence[Tensor]:
        return self._stashed.get(layer, ())

    @property
    def pending(self) -> bool:
        """Whether a skip has been stashed and not yet popped."""
        return bool(self._values)

    def has_any_of(self, layer: int) -> bool:
        """Whether the layer stashes or pops."""
        return layer in self._stashed or layer in self._popping
