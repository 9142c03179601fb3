"""The shapes and dtypes of the tensors that cross from partition to partition, inferred without running the model.

torch receives into tensors that are allocated in advance. Left alone, it infers their shapes by a real forward in train
mode on uninitialized memory, which ruins the statistics of batch norm. So we tell it: a copy of the model without
storage runs once for each new shape of micro-batch.

A boundary carries the value, then every skip on its way to a later partition. torch connects neighbours only, so a skip
passes through all partitions in between. A skip that was stashed as None is not sent.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.batchnorm import deferred_batch_norms
from gpipe_cli.pipeline.boundary import common_storages
from gpipe_cli.pipeline.context import CallerState, MicroBatch, Running
from gpipe_cli.pipeline.layer import layers_of
from gpipe_cli.pipeline.layer_loop import PartitionSkips
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.module_state import tensors_in
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.partitioning import make_partitions, partition_modules
from gpipe_cli.pytree import Template, flatten, unflatten
from gpipe_cli.sequential.deferred import clone_with
from gpipe_cli.skip.tracker import SkipName, use_skip_tracker
from gpipe_cli.torch_internals.fake_tensors import NEEDS_VALUES, fake_tensors, fake_twin
from gpipe_cli.torch_internals.tensors import storage_of


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    is_shared: bool = field(default=False, compare=False)
    """Whether its memory is also that of another tensor, so that no layer may write it."""

    @classmethod
    def of(cls, tensor: Tensor, shared: Collection[int] = ()) -> TensorSpec:
        """shared: storages that no layer may write."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            storage_of(tensor) in shared,
        )

    def example(self) -> Tensor:
        """A tensor that shows torch what to receive: contiguous memory, whatever lies in it."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.needs_grad)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'a number'} of {self.dtype}"


@final
@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """The tensors that enter a partition."""

    kinds: tuple[TensorSpec, ...]
    """The tensors of the value, then those of the skips."""
    template: Template
    """Makes the value from its tensors."""
    skip_names: tuple[SkipName, ...]
    """Skips that were stashed before the partition and are popped in it or after it."""

    @property
    def value_count(self) -> int:
        return len(self.kinds) - len(self.skip_names)


@final
class ShapeInference:
    """Infers boundaries with a copy of the whole model that has no storage."""

    def __init__(self, module: nn.Sequential, balance: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._mode = fake_tensors()
        with self._mode:
            clone = clone_with(module, functools.partial(fake_twin, device=device))
        assert isinstance(clone, nn.Sequential), "a copy has the type of the original"
        self._module = clone
        layers = layers_of(clone)
        self._partitions = make_partitions(partition_modules(clone, layers, balance), layers, [device])
        self._cache: dict[tuple[Any, ...], tuple[BoundarySpec, ...]] = {}

    def boundaries(
        self, tensors: Sequence[Tensor], template: Template, state: CallerState, *, training: bool
    ) -> tuple[BoundarySpec, ...]:
        """The boundary in front of each partition, for a micro-batch of these tensors."""
        kinds = tuple(TensorSpec.of(tensor) for tensor in tensors)
        # Autocast changes dtypes and grad mode changes what needs a gradient, so the caller's state is part of the
        # key.
        mode = (kinds, template, state, training)
        if mode not in self._cache:
            self._cache[mode] = self._find(tensors, template, state, training)
        return self._cache[mode]

    def _find(
        self, tensors: Sequence[Tensor], template: Template, state: CallerState, training: bool
    ) -> tuple[BoundarySpec, ...]:
        self._module.train(training)
        with self._mode, state.entered(), Running(MicroBatch(0, len(tensors[0]))):
            twins = [fake_twin(tensor, self._device) for tensor in tensors]
            boundaries = _infer(self._partitions, unflatten(template, twins))
        # Deferred batch norm has collected the statistics of a run that was none.
        for batch_norm in deferred_batch_norms(self._module):
            batch_norm.discard()
        return boundaries


def _infer(partitions: Sequence[Partition], value: Value) -> tuple[BoundarySpec, ...]:
    boundaries = []
    modules = [layer.module for partition in partitions for layer in partition.layers]
    # Kept alive: a layer may replace a buffer, and an activation could get the storage of the old one.
    tensors_of_modules = [tensor for module in modules for _, _, tensor in tensors_in(module)]
    held = set(map(storage_of, tensors_of_modules))
    skips: dict[SkipName, Tensor | None] = {}
    for partition in partitions:
        carried = sorted((name, skip) for name, skip in skips.items() if skip is not None)
        tensors, template = flatten(value, "output")
        tensors = (*tensors, *(skip for _, skip in carried))
        shared = common_storages(tensors) | held
        kinds = tuple(TensorSpec.of(tensor, shared) for tensor in tensors)
        boundaries.append(BoundarySpec(kinds, template, tuple(name for name, _ in carried)))
        received = [skips.pop(route.name) for route in partition.receives]
        tracker = PartitionSkips(partition.receives, received, partition.sends)
        with use_skip_tracker(tracker):
            for layer in partition.layers:
                try:
                    value = layer.module(value)
                except NEEDS_VALUES as error:
                    raise ConfigError(
                        f"layer {layer!r} looks at the values of its tensors ({error}), so other processes "
                        "cannot know what it will send them; use engine=threads"
                    ) from error
        skips.update(zip((route.name for route in partition.sends), tracker.sent(), strict=True))
    return tuple(boundaries)
