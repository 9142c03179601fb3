"""engine=processes: one process per partition, on torch.distributed.pipelining, in as many replicas as there are.

This is what runs inside one of them; `torch.distributed` and the groups `pipe` and `data` are there already.
"""

from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.distributed.pipe import RankPipe
from gpipe_cli.distributed.place import Place, check_placement
from gpipe_cli.engines.collectives import RankCollectives
from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.engines.stepping import PipeEngine
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
from gpipe_cli.schedule.checkpoint import Checkpoint


def build(
    module: nn.Sequential,
    objective: Objective,
    *,
    balance: list[int],
    devices: list[torch.device],
    chunks: int,
    eval_chunks: int,
    checkpoint: Checkpoint,
    schedule: str,
    deferred_batch_norm: bool,
    step_timeout: float | None,
    log_layers: bool,
    data_parallel: int = 1,
    max_restarts: int = 0,
) -> Engine:
    """Every process gives the same model and settings; `devices` are those of the processes of one pipe.

    `step_timeout` and `max_restarts` are for whoever started the processes, and watches them.
    """
    check_placement(schedule, len(balance), len(devices))
    place = Place.of_groups(len(balance), devices)
    if place.replicas != data_parallel:
        raise ConfigError(f"data_parallel={data_parallel}: the processes form {place.replicas} replicas")
    pipe = RankPipe(
        module,
        balance,
        place,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        deferred_batch_norm=deferred_batch_norm,
    )
    if log_layers:
        register_layer_logging_hooks(pipe.partitions)
    return PipeEngine(
        pipe,
        pipe.module,
        objective,
        balance=balance,
        first=place.device,
        last=place.device,
        eval_chunks=eval_chunks,
        collectives=RankCollectives(place, pipe.module, pipe.rank_of_layer),
    )
