"""engine=offload: one device and a model that need not fit on it, or even into memory.

Parameters and optimizer state live in host memory or in a file, and come to the device slice by slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from gpipe_cli.balance.solver import solve
from gpipe_cli.engines.engine import PipelineEngine, StepMeter
from gpipe_cli.engines.parameters import OffloadedParameters
from gpipe_cli.engines.protocol import Engine, EngineSpec, EngineTraits, TrainingObjective
from gpipe_cli.engines.update import update_waits
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.offloaded_pipe import offloaded_pipe
from gpipe_cli.offload.prefetcher import SlicePrefetcher
from gpipe_cli.offload.sizing import DeviceDemand, boundary_bytes, device_demand, layer_bytes, optimizer_bytes
from gpipe_cli.offload.slices import SlicedParameters, put_parameters_on
from gpipe_cli.offload.tiers import TIERS, CpuTier, DiskTier
from gpipe_cli.pipeline.microbatch import tensors_of
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.action import checkpointed_counts
from gpipe_cli.values import parse_bytes

TRAITS = EngineTraits(
    has_partitions=False,
    has_timeline=True,
    one_checkpoint_mode=True,
    step_memory_hint=(
        "try more engine.slices or a smaller engine.memory, checkpoint=always, more chunks, or a smaller batch_size"
    ),
    build_memory_hint="try more engine.slices or a smaller engine.memory; engine.to=disk needs the least host memory",
    ignored_keys=frozenset({"balance", "partitions", "device_memory", "schedule", "data_parallel", "shard"}),
)
DEFAULT_SLICES = 8
CHOICES = {"to": TIERS, "by": ("bytes", "time")}


def build(
    spec: EngineSpec,
    to: str = "cpu",
    slices: int | None = None,
    by: str = "bytes",
    memory: Any = None,
    prefetch: bool = True,
) -> Engine:
    slicing = Slicing(spec, to, slices, by, memory, prefetch)
    balance = slicing.balance()
    pipe, offloaded = slicing.offload(balance)
    pipe.step_timeout = spec.step_timeout
    return PipelineEngine(
        pipe,
        replace(spec, balance=balance),
        offloaded=offloaded,
        meter=StepMeter(pipe, watched=False),
        memory_hint=TRAITS.step_memory_hint,
    )


@final
@dataclass(frozen=True)
class Slicing:
    """How a model is cut into slices, and where they are kept; the fields are the keys of conf/engine/offload.yaml."""

    spec: EngineSpec
    to: str = "cpu"
    slices: int | None = None
    by: str = "bytes"
    memory: Any = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        for key, value in {"to": self.to, "by": self.by}.items():
            if value not in CHOICES[key]:
                raise ConfigError(f"engine.{key}={value}: must be one of: {', '.join(CHOICES[key])}")
        if self.slices is not None and self.memory is not None:
            raise ConfigError(
                f"engine.memory={self.memory}: decides how many slices there are; remove engine.slices"
            )
        if self.slices is not None and self.slices < 1:
            raise ConfigError(f"engine.slices={self.slices}: must be at least 1")
        if self.memory is not None:
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                raise ConfigError(f"engine.memory={self.memory}: {error}") from error

    @property
    def _buffers(self) -> int:
        """With prefetching a second buffer receives the next slice while the first is in use."""
        return 2 if self.prefetch else 1

    @property
    def _recomputed(self) -> int:
        """How many micro-batches each slice recomputes."""
        assert isinstance(self.spec.checkpoint, str), "slices share one checkpoint mode"
        return checkpointed_counts(self.spec.checkpoint, 1, self.spec.chunks)[0]

    def balance(self) -> list[int]:
        """Layers per slice."""
        module = self.spec.module
        if self.memory is not None:
            return self.demand().slices(self._costs(), parse_bytes(self.memory))
        if self.slices is not None and self.slices > len(module):
            raise ConfigError(
                f"engine.slices={self.slices}: the model has only {len(module)} layers; give at most that many"
            )
        return solve(self._costs(), self.slices or min(DEFAULT_SLICES, len(module))).balance

    def offload(self, balance: list[int]) -> tuple[Pipe, OffloadedParameters]:
        """Move the parameters to their tier, and return them with the pipe that runs the model from it."""
        spec = replace(self.spec, balance=balance)
        assert isinstance(spec.checkpoint, str), "slices share one checkpoint mode"
        workers = [0] * len(balance)
        offloaded = offload_layers(self.to, spec, workers, buffers=self._buffers, in_background=self.prefetch)
        pipe = offloaded_pipe(
            spec.module,
            balance,
            devices=spec.devices,
            stores=offloaded.prefetchers,
            chunks=spec.chunks,
            checkpoint=spec.checkpoint,
            deferred_batch_norm=spec.deferred_batch_norm,
        )
        return pipe, offloaded

    def demand(self) -> DeviceDemand:
        """What slices need on the device."""
        spec, sample = self.spec, self._sample()
        return device_demand(
            spec.module,
            spec.objective.optimizer,
            spec.devices[0],
            self._facts(),
            buffers=self._buffers,
            stores_gradients=waits(spec.objective),
            micro_batches=spec.chunks,
            recomputed=self._recomputed,
            batch_bytes=spec.chunks
            * sum(tensor.nbytes for tensor in tensors_of((sample.input, sample.target))),
        )

    def _costs(self) -> list[float]:
        """Per layer. `by=time` counts operations: to measure them the whole model would have to be in memory."""
        if self.by == "bytes":
            return list(map(float, layer_bytes(self.spec.module)))
        return [float(layer.forward_flops + layer.backward_flops) for layer in self._facts().operations]

    def _facts(self) -> ModelStats:
        return model_stats(self.spec.module, self._sample(), count_flops=self.by == "time")

    def _sample(self) -> Sample:
        assert self.spec.make_sample is not None, (
            "an engine that offloads needs to know the sizes of activations"
        )
        return self.spec.make_sample()


def offload_layers(
    to: str, spec: EngineSpec, workers: Sequence[int], *, buffers: int = 2, in_background: bool = True
) -> OffloadedParameters:
    """Move the parameters of every slice to a tier, and give each worker what brings them back.

    workers: for each slice of `spec.balance`, which of the devices runs it.
    """
    assert spec.make_sample is not None, "an engine that offloads needs to know the sizes of activations"
    module, balance, devices = spec.module, spec.balance, spec.devices
    tier = CpuTier(devices) if to == "cpu" else DiskTier(spec.scratch)
    # Space for the whole training state is reserved before a parameter moves, so a disk that is too small fails with
    # the model still intact, and not in a step.
    nbytes = sum(layer_bytes(module)) + sum(trained_bytes(spec))
    if to != "cpu":  # the file has the inputs from which slices are recomputed too
        recomputed = checkpointed_counts(spec.checkpoint, len(balance), spec.chunks)
        nbytes += boundary_bytes(module, balance, recomputed, spec.make_sample)
    tier.reserve(nbytes)
    value_of = put_parameters_on(devices[0], module)
    parameters = SlicedParameters.of(module, balance)
    parameters.place_shared([devices[worker] for worker in workers], value_of)
    slices = parameters.store(tier, value_of)
    prefetchers = []
    for worker, device in enumerate(devices):
        own = {index: slices[index] for index, owner in enumerate(workers) if owner == worker}
        prefetchers.append(SlicePrefetcher(own, tier, device, buffers=buffers, in_background=in_background))
    return OffloadedParameters(tier, prefetchers, list(parameters.shared))


def trained_bytes(spec: EngineSpec) -> list[int]:
    """For each layer the bytes that training stores in addition to its weights."""
    states = optimizer_bytes(spec.module, spec.objective.optimizer)
    if not waits(spec.objective):
        return states
    gradients = layer_bytes(spec.module, trained_only=True)
    return [state + own for state, own in zip(states, gradients, strict=True)]


def waits(objective: TrainingObjective) -> bool:
    return update_waits(objective.clip_grad_norm, scale_loss=objective.precision == "fp16")
