"""Log lines for each layer that runs.

Decides the words. Costs nothing unless hooks are registered, and next to nothing unless the logger listens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipe_cli.pipeline.context import current_microbatch, is_recomputing

logger = logging.getLogger("gpipe_cli.layers")


def register_layer_logging_hooks(partitions: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Log at DEBUG each layer of `pipe.partitions` before it runs; call `remove()` on each handle to end
    it.
    """
    return [
        layer.register_forward_pre_hook(_hook(name, index))
        for index, partition in enumerate(partitions)
        for name, layer in zip(_names(partition), partition.children(), strict=True)
    ]


def _names(partition: nn.Module) -> Iterable[str]:
    """Those of the whole model; a sequence of the user's own has its children's."""
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
