"""engine=single: the plain sequence, micro-batch by micro-batch, in the calling thread."""

from __future__ import annotations

from gpipe_cli.engines.engine import PipelineEngine
from gpipe_cli.engines.protocol import Engine, EngineSpec, EngineTraits
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.partitioning import move_to_devices

TRAITS = EngineTraits(
    has_partitions=False,
    step_memory_hint="try more chunks, a smaller batch_size, or engine=threads checkpoint=always on more devices",
    build_memory_hint="try engine=threads on more devices, or engine=offload (engine.to=disk if host memory is full)",
    ignored_keys=frozenset(
        {
            "balance",
            "partitions",
            "device_memory",
            "schedule",
            "checkpoint",
            "step_timeout",
            "data_parallel",
            "shard",
        }
    ),
)


def build(spec: EngineSpec) -> Engine:
    (device,) = spec.devices
    move_to_devices([spec.module], [device])
    pipe = plain_pipe(
        spec.module, chunks=spec.chunks, deferred_batch_norm=spec.deferred_batch_norm, device=device
    )
    return PipelineEngine(pipe, spec, memory_hint=TRAITS.step_memory_hint)
