"""engine=single: the plain sequence, micro-batch by micro-batch, in the calling thread."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.engines.stepping import PipeEngine
from gpipe_cli.pipeline.gpipe import PlainPipe


def build(
    module: nn.Sequential,
    objective: Objective,
    *,
    device: torch.device,
    chunks: int,
    eval_chunks: int,
    deferred_batch_norm: bool,
) -> Engine:
    module.to(device)
    pipe = PlainPipe(module, chunks=chunks, deferred_batch_norm=deferred_batch_norm)
    return PipeEngine(
        pipe,
        module,
        objective,
        balance=[len(module)],
        first=device,
        last=device,
        eval_chunks=eval_chunks,
    )
