"""engine=threads: partitions on worker threads of this process, on any devices it can reach."""

from __future__ import annotations

from typing import Any

from gpipe_cli.engines.engine import PipelineEngine, StepMeter
from gpipe_cli.engines.offload import offload_layers
from gpipe_cli.engines.parameters import OffloadedParameters
from gpipe_cli.engines.protocol import Engine, EngineSpec, EngineTraits
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.offloaded_pipe import offloaded_pipe
from gpipe_cli.offload.tiers import TIERS
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.schedule import traits
from gpipe_cli.torch_internals.tensors import exchanges_memory

TRAITS = EngineTraits(ignored_keys=frozenset({"data_parallel", "shard"}), has_timeline=True)


def build(spec: EngineSpec, offload: str | None = None) -> Engine:
    """offload: the tier that keeps a partition's parameters and optimizer state while no worker uses it."""
    pipe, offloaded = make_pipe(spec, offload)
    pipe.step_timeout = spec.step_timeout
    meter = StepMeter(pipe, watched=spec.measure_utilization)
    return PipelineEngine(pipe, spec, offloaded=offloaded, meter=meter)


def make_pipe(spec: EngineSpec, offload: str | None) -> tuple[Pipe, OffloadedParameters | None]:
    arguments: dict[str, Any] = {
        "devices": spec.devices,
        "chunks": spec.chunks,
        "checkpoint": spec.checkpoint,
        "deferred_batch_norm": spec.deferred_batch_norm,
        "schedule": spec.schedule,
    }
    if offload is None:
        return GPipe(spec.module, spec.balance, **arguments), None
    offloaded = offload_partitions(spec, offload)
    return offloaded_pipe(spec.module, spec.balance, stores=offloaded.prefetchers, **arguments), offloaded


def offload_partitions(spec: EngineSpec, tier_name: str) -> OffloadedParameters:
    """Move the parameters of every partition to a tier, and give each worker what brings them back."""
    if tier_name not in TIERS:
        raise ConfigError(f"engine.offload={tier_name}: must be one of: {', '.join(TIERS)}, or null")
    devices = spec.devices
    if len({device.type for device in devices}) > 1 and not all(map(exchanges_memory, devices)):
        raise ConfigError(
            f"engine.offload={tier_name}: torch cannot give a parameter memory of these devices in turn: "
            f"{', '.join(map(str, devices))}; give devices of one type, or engine.offload=null"
        )
    workers = traits(spec.schedule).placement(len(spec.balance), len(devices))
    return offload_layers(tier_name, spec, workers)
