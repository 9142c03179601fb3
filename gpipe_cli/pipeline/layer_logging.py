"""Log lines for each layer that runs. They cost nothing unless hooks are registered."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipe_cli.pipeline.context import current_microbatch, is_recomputing

logger = logging.getLogger("gpipe_cli.layers")


def register_layer_logging_hooks(partitions: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Log each layer of `pipe.partitions` at DEBUG before it runs, until you call `remove()` on the handles."""
    return [
        layer.register_forward_pre_hook(_hook(name, index))
        for index, partition in enumerate(partitions)
        for name, layer in zip(_names(partition), partition.children(), strict=True)
    ]


def _names(partition: nn.Module) -> Iterable[str]:
    """The display names in the whole model; for any other sequence, the names of its children."""
    return getattr(partition, "layer_names", dict(partition.named_children()))


def _hook(name: str, partition: int) -> Any:
    def log(layer: nn.Module, args: Any) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            kind = type(layer).__name__
            logger.debug("Executing layer '%s' in partition %d: %s%s", name, partition, kind, _suffix())

    return log


def _suffix() -> str:
    micro_batch = current_microbatch()
    if micro_batch is None:
        return ""
    return f" [micro-batch {micro_batch.index}{', recompute' if is_recomputing() else ''}]"
