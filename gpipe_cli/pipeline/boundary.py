"""Where the autograd graph of one partition ends and that of the next one begins.

A partition sends detached tensors and whether each takes part in backward; the receiver's gradients return to where
the tensors were detached. `enter` gives the layers tensors that share the received memory and are no leaves, so a layer
may write its input in place.

A layer may still reach a tensor of another partition without receiving it through a boundary, for example with a
dictionary of skips keyed by `current_microbatch()`. `GraphLeakDetector` finds out: the backward of one partition would
otherwise run nodes of another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.aliasing import Alias, aligned_clone, find_aliases
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pytree import Template, unflatten
from gpipe_cli.torch_internals.autograd_engine import apply
from gpipe_cli.torch_internals.tensor_memory import version_of

Gradients = tuple[Tensor | None, ...]
"""One gradient per tensor of a partition input; None where there is none."""

NO_VALUE: Template = -1
"""The template of an input that carries only skips."""
NOTHING_SHARED: Mapping[int, Alias] = {}

ANCHOR = torch.zeros(0, requires_grad=True)
"""Makes `_Entry` differentiable although its inputs are detached. It never receives a gradient, so all share it."""


class PartitionInput(NamedTuple):
    """The detached tensors that one partition sends to another: those of the value, then skips."""

    tensors: tuple[Tensor | None, ...]
    """Of the value, then one per skip, then bases of aliases. None for a skip stashed as None, and for an alias."""
    needs_grad: tuple[bool, ...]
    template: Template = NO_VALUE
    """Builds the value from its tensors."""
    value_count: int = 0
    """How many tensors belong to the value."""
    skip_count: int = 0
    aliases: Mapping[int, Alias] = NOTHING_SHARED
    """By place, the tensors that share memory with another one, which the receiver builds from it (see `aliasing`)."""

    @classmethod
    def of_pipe(cls, values: Sequence[Tensor], template: Template) -> PartitionInput:
        """The input of the first partition."""
        # Micro-batches are views of one tensor and would share its version counter, so that a write to one would look
        # like a write to all. `.data` gives each a counter of its own.
        return cls(
            tuple([tensor.data for tensor in values]),
            tuple([tensor.requires_grad for tensor in values]),
            template,
            len(values),
        )

    @property
    def value(self) -> Value:
        return self.unpack(self.tensors)[0]

    @property
    def present(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor is not None)

    def unpack(self, tensors: Sequence[Tensor | None]) -> tuple[Value, Sequence[Tensor | None]]:
        """The value and the skips, built from `tensors` in place of the input's own."""
        if self.aliases:
            complete = list(tensors)
            for place, alias in self.aliases.items():
                base = tensors[alias.of]
                assert base is not None, "an alias is built from a tensor that crosses"
                complete[place] = alias.build(base)
            tensors = complete
        # Only skips may be None, and no template refers to a skip.
        value = unflatten(self.template, tensors)  # type: ignore[arg-type]
        return value, tensors[self.value_count : self.value_count + self.skip_count]

    def as_if_tracked(self, needs_grad: tuple[bool, ...], aliases: Mapping[int, Alias]) -> PartitionInput:
        """The input as if autograd had tracked its tensors; `aliases` are those of an input that it did track."""
        tracked = {
            place: replace(alias, detached=place in aliases and aliases[place].detached)
            for place, alias in self.aliases.items()
        }
        return self._replace(needs_grad=needs_grad, aliases=tracked)

    def linked_skips(self) -> Collection[int]:
        """Which skips share memory with another tensor of the input, as views that autograd knows."""
        if not self.aliases:
            return ()
        linked = {place for alias in self.aliases.items() for place in (alias[0], alias[1].of)}
        return {place - self.value_count for place in linked if place >= self.value_count}

    def cloned(self) -> PartitionInput:
        return self._replace(
            tensors=tuple(tensor if tensor is None else aligned_clone(tensor) for tensor in self.tensors)
        )

    def versions(self) -> list[int]:
        return [version_of(tensor) for tensor in self.tensors if tensor is not None]


def pack(
    values: Sequence[Tensor],
    template: Template,
    skips: Sequence[Tensor | None] = (),
    *,
    keep_aliases: bool = True,
) -> tuple[PartitionInput, Sequence[Tensor | None]]:
    """What one partition receives, and the tensors it was detached from, where the gradients will arrive."""
    sources: Sequence[Tensor | None] = (*values, *skips) if skips else values
    aliases: Mapping[int, Alias] = NOTHING_SHARED
    if keep_aliases and len(sources) > 1:
        bases, aliases = find_aliases(sources)
        if aliases:
            crossing = (None if place in aliases else tensor for place, tensor in enumerate(sources))
            sources = [*crossing, *bases]
    sources = [tensor if tensor is None else _tracked(tensor) for tensor in sources]
    packed = PartitionInput(
        tuple([None if tensor is None else tensor.detach() for tensor in sources]),
        tuple([tensor is not None and tensor.requires_grad for tensor in sources]),
        template,
        len(values),
        len(skips),
        aliases,
    )
    return packed, sources


def _tracked(tensor: Tensor) -> Tensor:
    """Detach a view of a parameter that was made without a graph: it claims to require grad because its base does."""
    is_claim = tensor.requires_grad and tensor.grad_fn is None and tensor._base is not None
    return tensor.detach() if is_claim else tensor


@final
class GradSink:
    """Receives, while it is open, the gradients of what entered a partition."""

    __slots__ = ("_open", "_places", "gradients")

    def __init__(self, needs_grad: tuple[bool, ...]) -> None:
        self._places = tuple(place for place, needed in enumerate(needs_grad) if needed)
        self._open = False
        self.gradients: list[Tensor | None] = [None] * len(needs_grad)

    def __enter__(self) -> GradSink:
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False

    def fill(self, gradients: tuple[Tensor | None, ...]) -> None:
        if not self._open:
            # The backward of another partition reached this one through a tensor that did not cross a boundary.
            raise RuntimeError(
                "a layer used a tensor of another partition that was not handed to it, so its gradient "
                "would be lost. Hand it over with @skippable (see gpipe_cli.skip)"
            )
        # Autograd calls this once per backward, when the gradients of all uses have been summed.
        for place, gradient in zip(self._places, gradients, strict=True):
            self.gradients[place] = gradient

    @property
    def expects_any(self) -> bool:
        return bool(self._places)

    def take(self) -> Gradients:
        gradients = tuple(self.gradients)
        self.gradients = [None] * len(gradients)
        return gradients


class _Entry(Function):
    """Identity without a copy. Inside a Function the output of `detach` is no view, so layers may write it in place."""

    @staticmethod
    def forward(ctx: Any, sink: GradSink, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sink = sink
        # A tensor that the loss does not depend on gets None, not zeros that would travel through all partitions.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.sink.fill(gradients)
        return (None,) * (2 + len(gradients))


def enter(inputs: Sequence[PartitionInput], sink: GradSink) -> list[Sequence[Tensor | None]]:
    """The tensors of each input as the partition's layers receive them; `sink` receives their gradients."""
    if len(inputs) == 1 and all(inputs[0].needs_grad):
        return [apply(_Entry, sink, ANCHOR, *inputs[0].tensors)] if inputs[0].tensors else [()]
    needing = [
        tensor
        for input in inputs
        for tensor, needed in zip(input.tensors, input.needs_grad, strict=True)
        if needed
    ]
    if not needing:
        return [input.tensors for input in inputs]
    entered = iter(apply(_Entry, sink, ANCHOR, *needing))
    return [
        [
            next(entered) if needed else tensor
            for tensor, needed in zip(input.tensors, input.needs_grad, strict=True)
        ]
        for input in inputs
    ]


def roots_of(tensors: Sequence[Tensor | None]) -> tuple[GradientEdge | None, ...]:
    """Where backward begins for each tensor. An edge, unlike a tensor, keeps no activation alive."""
    return tuple(
        [None if tensor is None or not tensor.requires_grad else _edge(tensor) for tensor in tensors]
    )


def _edge(tensor: Tensor) -> GradientEdge:
    # get_gradient_edge checks again what the caller knows; only a leaf needs it, to get its gradient accumulator.
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


@final
class GraphLeak(RuntimeError):
    """Raised in the first forward of a partition. The executor then keeps the whole graph, if it can."""


@final
class GraphLeakDetector:
    """Detects a path from a partition's graph to the sink or to a parameter of another partition."""

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
