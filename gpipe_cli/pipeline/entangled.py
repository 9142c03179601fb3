"""Finds out whether a layer used a tensor of another partition that no boundary handed to it.

A dictionary of skips keyed by `current_microbatch()` does that. The partitions' graphs then hang together,
and the backward of one would walk into another's. Knows nothing of what is to be done about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor, nn

from gpipe_cli.pipeline.boundary import Mailbox
from gpipe_cli.pipeline.layer import Layer

__all__ = ["Entangled", "Watch"]


@final
class Entangled(RuntimeError):
    """Raised while a partition is learnt; its text is for users whose pipe cannot keep the graph whole."""


@final
class Watch:
    """Follows the graph that grows while a partition's layers run, each node once."""

    def __init__(self, mailbox: Mailbox, own: Sequence[nn.Module], others: Sequence[nn.Module]) -> None:
        self._mailbox = mailbox
        owned = {id(parameter) for module in own for parameter in module.parameters()}
        self._foreign = {id(leaf) for module in others for leaf in module.parameters()} - owned
        self._seen: set[Any] = set()

    def look(self, layer: Layer, value: Any) -> None:
        """Raise if the graph behind `value`, which `layer` has just returned, leaves the partition."""
        nodes: list[Any] = [tensor.grad_fn for tensor in _tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            if self._is_foreign(node):
                raise Entangled(
                    f"layer {layer!r} used a tensor of another partition that was not handed to it, so its "
                    "gradient would be lost. Hand it over with @skippable (see gpipe_cli.skip), or use "
                    "checkpoint='never'"
                )
            nodes.extend(following for following, _ in node.next_functions)

    def _is_foreign(self, node: Any) -> bool:
        mailbox = getattr(node, "mailbox", self._mailbox)
        return mailbox is not self._mailbox or id(getattr(node, "variable", None)) in self._foreign


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of a value that may hold anything: it need not leave the partition."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)
