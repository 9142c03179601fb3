"""Detects layers that use a tensor of another partition without receiving it through a boundary.

A dictionary of skips keyed by `current_microbatch()` does that. The partitions' autograd graphs are then connected, and
the backward of one partition would run nodes of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.pipeline.boundary import GradSink
from gpipe_cli.pipeline.layer import Layer


@final
class GraphLeak(RuntimeError):
    """Raised in the first forward of a partition. The executor then keeps the whole graph, if it can."""


@final
class GraphLeakDetector:
    """Walks the graph that a partition's layers build, visiting each node once."""

    def __init__(self, sink: GradSink, own: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
        self._sink = sink
        owned = {id(parameter) for module in own for parameter in module.parameters()}
        self._foreign = {id(leaf) for module in others for leaf in module.parameters()} - owned
        self._visited: set[Any] = set()

    def check(self, layer: Layer, value: Any) -> None:
        """Raise if the graph of `value`, which `layer` returned, leads out of the partition."""
        nodes: list[Any] = [tensor.grad_fn for tensor in _tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._visited:
                continue
            self._visited.add(node)
            if self._is_foreign(node):
                raise GraphLeak(
                    f"layer {layer!r} used a tensor of another partition that was not handed to it, so its "
                    "gradient would be lost. Hand it over with @skippable (see gpipe_cli.skip), or use "
                    "checkpoint='never'"
                )
            nodes.extend(following for following, _ in node.next_functions)

    def _is_foreign(self, node: Any) -> bool:
        sink = getattr(node, "sink", self._sink)
        return sink is not self._sink or id(getattr(node, "variable", None)) in self._foreign


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value that may hold anything, because it need not leave the partition."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)
