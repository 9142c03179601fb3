"""engine=processes: one process per partition, on torch.distributed.pipelining, in as many replicas as you ask for.

This module runs inside one of these processes, where the groups `pipe` and `data` already exist.
"""

from __future__ import annotations

from dataclasses import replace

from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.rank_pipe import rank_of_layer, rank_pipe
from gpipe_cli.distributed.replicas import ParameterShards
from gpipe_cli.engines.collectives import Collectives
from gpipe_cli.engines.engine import PipelineEngine
from gpipe_cli.engines.protocol import Engine, EngineSpec, EngineTraits
from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule import traits

TRAITS = EngineTraits(needs_processes=True)


def build(spec: EngineSpec, max_restarts: int = 0) -> Engine:
    """Call it in every process with the same spec; `max_restarts` and `spec.step_timeout` are for the launcher."""
    workers = traits(spec.schedule).placement(len(spec.balance), len(spec.devices))
    coords = RankCoords.of_groups(workers, spec.devices)
    pipe = rank_pipe(
        spec.module,
        spec.balance,
        coords,
        chunks=spec.chunks,
        checkpoint=spec.checkpoint,
        schedule=spec.schedule,
        deferred_batch_norm=spec.deferred_batch_norm,
    )
    shards = None
    if spec.shards_optimizer:
        if coords.replicas == 1:
            raise ConfigError(
                "shard=optimizer: divides the optimizer's state among replicas, and there is one; "
                "give data_parallel=2 or shard=none"
            )
        trained = [parameter for parameter in pipe.module.parameters() if parameter.requires_grad]
        shards = ParameterShards([parameter for parameter in trained if not parameter.is_meta], coords)
    ranks = rank_of_layer(spec.balance, coords)
    return PipelineEngine(
        pipe,
        replace(spec, module=pipe.module, devices=[coords.device]),
        collectives=Collectives(coords, pipe.module, ranks, sharded=shards is not None),
        shards=shards,
    )
