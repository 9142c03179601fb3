"""How few samples a micro-batch of a run may have: two where a layer, such as batch norm, rejects a single one.

A single sample may give a batch norm one value per channel, whose variance is not defined. Whether it does depends on
the sizes inside the model. So gpipe runs the model on the meta device, only where a run would make such a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gpipe_cli.config.schema import CostConfig, ModelConfig, TrainConfig
from gpipe_cli.data.loading import replica_part
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.layer_check import layer_that_rejects_one_row
from gpipe_cli.pipeline.microbatch import micro_batches
from gpipe_cli.run.data import BatchLoader

LEAST_ROWS = 2
"""Where one row is rejected."""


def with_least_rows(settings: ModelConfig, loader: BatchLoader, model: nn.Sequential) -> BatchLoader:
    """The loader with the `least_rows` of the model; ConfigError if a mini-batch of the run has fewer."""
    if not isinstance(settings, CostConfig):  # nothing is trained
        return loader
    sizes = _mini_batch_sizes(settings, loader)
    parts = {
        size: {
            len(replica_part(list(range(size)), replica, loader.replicas))
            for replica in range(loader.replicas)
        }
        for size in sizes
    }
    rows = [part for own in parts.values() for part in own if part]
    if min(rows) >= LEAST_ROWS * settings.chunks:
        return loader
    layer = layer_that_rejects_one_row(model, loader.traced_batch())
    if layer is None:
        return loader
    for size, own in parts.items():
        if 1 in own:
            raise _refusal(loader, size, layer)
    notes = []
    for part in rows:
        count, least = (len(micro_batches(part, settings.chunks, least)) for least in (1, LEAST_ROWS))
        if count != least:
            notes.append(
                f"chunks={settings.chunks}: {layer} needs {LEAST_ROWS} samples in training, so a mini-batch of {part} "
                f"becomes {least} micro-batch{'es' if least > 1 else ''}, not {count}"
            )
    return replace(loader, least_rows=LEAST_ROWS, notes=(*loader.notes, *notes))


def _mini_batch_sizes(settings: CostConfig, loader: BatchLoader) -> list[int]:
    """The different sizes of the mini-batches that the command trains on, the last one of an epoch included."""
    full = min(loader.batch_size, len(loader.data.train))
    last = len(loader.data.train) % loader.batch_size
    is_reached = (
        isinstance(settings, TrainConfig)
        and not loader.drop_last
        and (settings.steps is None or settings.steps >= loader.steps_per_epoch)
    )
    return [full, last] if last and last != full and is_reached else [full]


def _refusal(loader: BatchLoader, size: int, layer: str) -> ConfigError:
    samples = len(loader.data.train)
    is_last = size < loader.batch_size
    which = f"the last mini-batch of {samples} samples" if is_last else "a mini-batch"
    has = (
        f"has {size}"
        if loader.replicas == 1
        else f"leaves one of data_parallel={loader.replicas} replicas 1 of {size}"
    )
    cure = "set data.drop_last=true, or another batch_size" if is_last else "give a larger batch_size"
    if samples < loader.batch_size:
        cure = "give more samples"
    return ConfigError(
        f"batch_size={loader.batch_size}: {which} {has}, but {layer} needs at least {LEAST_ROWS} in training; {cure}"
    )
