"""The leaves of a partition's graph: which of them a backward fills, and whether they are still what the forward saw.

Knows nothing of layers or threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.boundary import ANCHOR
from gpipe_cli.torch_internals.engine import capture_gradients, run_backward
from gpipe_cli.torch_internals.graph_progress import Node, nodes_behind
from gpipe_cli.torch_internals.graph_task import without_hooks
from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = ["NO_TENSORS", "Collected", "ModuleTensors", "leaves_behind", "modified_in_place"]


@final
@dataclass(slots=True)
class Collected:
    """What a backward gives to its caller instead of adding it to `.grad`."""

    leaves: dict[int, Tensor]
    """By id; their gradients are collected."""
    accumulated: Collection[int] | None
    """The ids of other leaves that get theirs as usual; None for all of them."""
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def run(self, roots: Sequence[Any], gradients: Sequence[Tensor], *, keep_graph: bool) -> None:
        """Run a backward, in the order of the micro-batches for each leaf."""
        leaves = []
        if self.leaves or self.accumulated is None or self.accumulated:
            leaves = [leaf for leaf in leaves_behind([root.node for root in roots]) if self._wants(leaf)]
        # The caller's backward runs the hooks, on what is collected.
        with without_hooks(leaves):
            captured = capture_gradients(roots, gradients, keep_graph=keep_graph, inputs=(ANCHOR, *leaves))
        for leaf, gradient in zip(leaves, captured[1:], strict=True):
            if gradient is None:
                continue
            if id(leaf) not in self.leaves:
                run_backward([torch.autograd.graph.get_gradient_edge(leaf)], [gradient], keep_graph=False)
            elif id(leaf) in self.gradients:
                self.gradients[id(leaf)] = self.gradients[id(leaf)] + gradient
            else:
                self.gradients[id(leaf)] = gradient

    def take(self, leaf: Tensor) -> Tensor | None:
        return self.gradients.pop(id(leaf), None)

    def _wants(self, leaf: Tensor) -> bool:
        if leaf is ANCHOR:
            return False
        return self.accumulated is None or id(leaf) in self.leaves or id(leaf) in self.accumulated


def leaves_behind(nodes: Sequence[Node]) -> list[Tensor]:
    """The leaves of the graph that begins with `nodes`."""
    leaves = (getattr(node, "variable", None) for node in nodes_behind(nodes))
    return [leaf for leaf in leaves if leaf is not None]


@final
class ModuleTensors:
    """The parameters, buffers and modes of some layers as they are now."""

    __slots__ = ("_tensors", "parameters", "training")

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = [module for layer in layers for module in layer.modules()]
        self.training = tuple([module.training for module in modules])
        self._tensors: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = [
            (module, held, name, tensor)
            for module in modules
            # Deferred batch norm commits its statistics after the forward, and recomputes without them.
            for held in (module._parameters, {} if isinstance(module, DeferredBatchNorm) else module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self.parameters = [tensor for module, held, _, tensor in self._tensors if held is module._parameters]

    def versions(self, but: Collection[nn.Module]) -> int:
        """A number that grows with every write to one of them, except those of the modules in `but`."""
        return sum(
            [version_of(tensor) for module, _, _, tensor in self._tensors if not but or module not in but]
        )

    @contextlib.contextmanager
    def in_place(self, but: Collection[nn.Module]) -> Iterator[None]:
        """Inside, those that were replaced by other tensors since are back, except those of the modules in `but`."""
        replaced = [
            (held, name, tensor, held.get(name))
            for module, held, name, tensor in self._tensors
            if held.get(name) is not tensor and module not in but
        ]
        for held, name, tensor, _ in replaced:
            held[name] = tensor
        try:
            yield
        finally:
            for held, name, _, other in replaced:
                held[name] = other


NO_TENSORS = ModuleTensors(())


def modified_in_place(what: str, partition: int) -> RuntimeError:
    """The error that autograd raises where a graph is kept, for a partition that has none until it is recomputed."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was changed between forward and backward, so partition {partition} cannot be recomputed "
        "to the same values"
    )
