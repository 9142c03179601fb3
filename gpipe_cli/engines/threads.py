"""engine=threads: partitions on worker threads of this process, on any devices it can reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe_cli.engines.protocol import Engine, Objective
from gpipe_cli.engines.sliced import Away, SlicedEngine, make_tier
from gpipe_cli.engines.stepping import PipeEngine
from gpipe_cli.engines.utilisation import Gauge
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.cut import parameters_of
from gpipe_cli.offload.pipe import OffloadedPipe
from gpipe_cli.offload.rotation import Rotation
from gpipe_cli.offload.sizing import border_bytes
from gpipe_cli.offload.tiers import TIERS
from gpipe_cli.pipeline.gpipe import GPipe, ThreadedPipe
from gpipe_cli.pipeline.layer_logging import register_layer_logging_hooks
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.action import partitions_of
from gpipe_cli.schedule.checkpoint import Checkpoint, checkpoint_stops


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
    scratch: Path = Path(),
    make_sample: Callable[[], Sample] | None = None,
    offload: str | None = None,
    gauged: bool = False,
) -> Engine:
    """offload: where partitions are kept while they are not worked on; scratch: a folder for files of them."""
    away = None
    if offload is not None:
        assert make_sample is not None, "asked of whoever wants partitions kept away"
        recomputed = checkpoint_stops(checkpoint, len(balance), chunks)
        borders = partial(border_bytes, module, balance, recomputed, make_sample)
        away = take_away(module, objective, balance, devices, offload, scratch, borders)
    shared: dict[str, Any] = {
        "devices": devices,
        "chunks": chunks,
        "checkpoint": checkpoint,
        "deferred_batch_norm": deferred_batch_norm,
        "schedule": schedule,
    }
    pipe: ThreadedPipe = (
        GPipe(module, balance, **shared)
        if away is None
        else OffloadedPipe(module, balance, stores=away.rotations, **shared)
    )
    pipe.step_timeout = step_timeout
    if log_layers:
        register_layer_logging_hooks(pipe.partitions)
    first, last = pipe.devices[0], pipe.devices[-1]
    if away is not None:
        return SlicedEngine(
            pipe, module, objective, away, balance=balance, first=first, last=last, eval_chunks=eval_chunks
        )
    return PipeEngine(
        pipe,
        module,
        objective,
        balance=balance,
        first=first,
        last=last,
        eval_chunks=eval_chunks,
        gauge=Gauge(pipe) if gauged else None,
    )


def take_away(
    module: nn.Sequential,
    objective: Objective,
    balance: list[int],
    devices: list[torch.device],
    offload: str,
    scratch: Path,
    borders: Callable[[], int],
) -> Away:
    """Keep the partitions of a pipeline elsewhere, and so many bytes of what they are recomputed from."""
    if offload not in TIERS:
        raise ConfigError(f"engine.offload={offload}: must be one of: {', '.join(TIERS)}, or null")
    tier = make_tier(offload, devices[0], scratch, module, objective, borders)
    parameters = parameters_of(module, balance)
    parameters.keep_shared(devices)
    slices = parameters.on(tier)
    rotations = [
        Rotation(
            {one: slices[one] for one in partitions_of(worker, len(balance), len(devices))}, tier, device
        )
        for worker, device in enumerate(devices)
    ]
    return Away(tier, rotations, list(parameters.shared))
