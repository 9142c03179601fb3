"""engine=threads: partitions on worker threads of this process, on any devices it can reach."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.engines.stepping import PipeEngine
from gpipe_cli.engines.utilisation import Gauge
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks


def build(
    module: nn.Sequential,
    objective: Objective,
    *,
    balance: list[int],
    devices: list[torch.device],
    chunks: int,
    eval_chunks: int,
    checkpoint: str,
    schedule: str,
    deferred_batch_norm: bool,
    step_timeout: float | None,
    log_layers: bool,
    gauged: bool = False,
) -> Engine:
    pipe = GPipe(
        module,
        balance,
        devices=devices,
        chunks=chunks,
        checkpoint=checkpoint,
        deferred_batch_norm=deferred_batch_norm,
        schedule=schedule,
    )
    pipe.step_timeout = step_timeout
    if log_layers:
        register_layer_logging_hooks(pipe.partitions)
    return PipeEngine(
        pipe,
        module,
        objective,
        balance=balance,
        first=pipe.devices[0],
        last=pipe.devices[-1],
        eval_chunks=eval_chunks,
        gauge=Gauge(pipe) if gauged else None,
    )
