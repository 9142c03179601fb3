"""Log lines for each layer that runs. They cost nothing unless they are asked for.

`register_layer_logging_hooks` logs each layer before it runs, for users of `GPipe`. `log_layer_times` logs it after it
has run, with its time, for `log.layers=true`.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from gpipe_cli.accelerator.streams import finish_queued
from gpipe_cli.pipeline.batch_state import SavedForBackward
from gpipe_cli.pipeline.context import current_microbatch, is_recomputing
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.sequential import layer_class
from gpipe_cli.torch_internals.autograd import nodes_behind, number_of

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
            kind = layer_class(layer)
            logger.debug("Executing layer '%s' in partition %d: %s%s", name, partition, kind, _suffix())

    return log


def _suffix() -> str:
    micro_batch = current_microbatch()
    if micro_batch is None:
        return ""
    return f" [micro-batch {micro_batch.index}{', recompute' if is_recomputing() else ''}]"


def log_layer_times(partitions: Sequence[Partition]) -> None:
    """From now on, log each layer at DEBUG after each forward, recomputation and backward of a micro-batch."""
    for partition in partitions:
        times = _LayerTimes(partition)
        partition.watch_backward(times.backward)
        for layer in partition.layers:
            layer.module.register_forward_pre_hook(times.begin_forward)
            layer.module.register_forward_hook(times.forward_of(layer))


@final
class _LayerTimes:
    """Times the layers of one partition. Only one thread at a time runs a partition.

    On an accelerator it waits for the device before it looks at the clock, so a time is that of the work itself and not
    of queueing it. The waiting slows the step down.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._began = 0.0

    def begin_forward(self, module: nn.Module, args: Any) -> None:
        self._began = self._now()

    def forward_of(self, layer: Layer) -> Any:
        """The hook that runs after the layer; outside the pipe it logs nothing."""

        def log(module: nn.Module, args: Any, output: Any) -> None:
            micro_batch = current_microbatch()
            if micro_batch is not None:
                phase = "recompute" if is_recomputing() else "forward"
                self._log(phase, micro_batch.index, layer, self._now() - self._began)

        return log

    @contextmanager
    def backward(self, saved: SavedForBackward, phase: str) -> Iterator[None]:
        """Time the layers in the backward that the block runs.

        Autograd runs its nodes from the last created to the first, so those of one layer follow each other. A layer's
        time is that from its first node to the first of another layer. Each half of a split backward has its own times.
        """
        begun: list[tuple[int, float]] = []

        def hook(place: int) -> Any:
            def begin(gradients: Any) -> None:
                if not begun or begun[-1][0] != place:
                    begun.append((place, self._now()))

            return begin

        handles = [
            node.register_prehook(hook(place))
            for node, place in _nodes_of_layers(saved, len(self._partition.layers))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        seconds = dict.fromkeys([place for place, _ in begun], 0.0)
        for (place, begin), (_, end) in pairwise([*begun, (-1, self._now())]):
            seconds[place] += end - begin
        for place, taken in seconds.items():
            if place < len(self._partition.layers):  # what comes after the last layer is the loss
                self._log(phase, saved.task.micro_batch.index, self._partition.layers[place], taken)

    def _now(self) -> float:
        finish_queued(self._partition.device)
        return time.perf_counter()

    def _log(self, phase: str, micro_batch: int, layer: Layer, seconds: float) -> None:
        logger.debug(
            "%s | micro-batch %d | partition %d | layer %s | %s | %.3f ms",
            phase,
            micro_batch,
            self._partition.index,
            layer.name,
            layer_class(layer.module),
            1000 * seconds,
        )


def _nodes_of_layers(saved: SavedForBackward, layers: int) -> Iterator[tuple[Any, int]]:
    """The nodes that the layers and the loss created, and the place of the layer; `layers` is that of the loss."""
    numbers = saved.node_numbers
    for node in nodes_behind([root.node for root in saved.roots if root is not None]):
        # Accumulators of leaves have numbers beyond all others. What they do belongs to the node that ran before.
        if numbers[0] <= number_of(node) < numbers[-1]:
            yield node, bisect.bisect_right(numbers, number_of(node)) - 1
