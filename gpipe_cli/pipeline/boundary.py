"""Where the autograd graph of one partition ends and that of the next one begins.

A partition sends detached tensors and whether each takes part in backward; the receiver's gradients return to where
the tensors were detached. `enter` gives the layers tensors that share the received memory and are no leaves, so a layer
may write its input in place. It may not write memory that the sender or another partition also sees under another
name: autograd would not know of the write there.

A layer may still reach a tensor of another partition without receiving it through a boundary, for example with a
dictionary of skips keyed by `current_microbatch()`. `GraphLeakDetector` finds out: the backward of one partition would
otherwise run nodes of another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pytree import Template, unflatten
from gpipe_cli.torch_internals.autograd import ACCUMULATE_GRAD, apply, graph_behind, node_type
from gpipe_cli.torch_internals.tensors import (
    copy_memory,
    is_untracked_view,
    is_view,
    storage_of,
    version_of,
)

Gradients = tuple[Tensor | None, ...]
"""One gradient per tensor of a partition input; None where there is none."""

NO_VALUE: Template = -1
"""The template of an input that carries only skips."""
NOWHERE: frozenset[int] = frozenset()

ANCHOR = torch.zeros(0, requires_grad=True)
"""Makes `_Entry` differentiable although its inputs are detached. It never receives a gradient, so all share it."""


class PartitionInput(NamedTuple):
    """The detached tensors that one partition sends to another: those of the value, then skips."""

    tensors: tuple[Tensor | None, ...]
    """The tensors of the value, then one per skip; None for a skip stashed as None."""
    needs_grad: tuple[bool, ...]
    template: Template = NO_VALUE
    """Builds the value from its tensors."""
    value_count: int = 0
    """How many tensors belong to the value."""
    shared: frozenset[int] = NOWHERE
    """Places of tensors whose memory is also that of another tensor, so that no layer may write it."""

    @classmethod
    def of_pipe(cls, values: Sequence[Tensor], template: Template) -> PartitionInput:
        """The input of the first partition."""
        return cls(
            tuple([_resolved(tensor.detach()) for tensor in values]),
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
        # Only skips may be None, and no template refers to a skip.
        value = unflatten(self.template, tensors)  # type: ignore[arg-type]
        return value, tensors[self.value_count :]

    def copied(self) -> PartitionInput:
        return self._replace(tensors=copy_memory(self.tensors))

    def shared_storages(self) -> set[int]:
        return {storage_of(tensor) for place in self.shared if (tensor := self.tensors[place]) is not None}

    def kinds(self) -> tuple[Any, ...]:
        """What recompute must repeat: the template, and the shape, dtype and need of grad of each tensor."""
        kinds = (None if tensor is None else (tensor.shape, tensor.dtype) for tensor in self.tensors)
        return self.template, self.needs_grad, *kinds

    def versions(self) -> list[int]:
        return [0 if tensor is None else version_of(tensor) for tensor in self.tensors]


def _resolved(tensor: Tensor) -> Tensor:
    """The tensor itself, unless it is a lazy conjugate or negation of its memory."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def pack(
    values: Sequence[Tensor],
    template: Template,
    skips: Sequence[Tensor | None] = (),
    shared: Collection[int] = (),
    held: Collection[int] = (),
) -> tuple[PartitionInput, Sequence[Tensor | None]]:
    """What one partition receives, and the tensors it was detached from, where the gradients will arrive.

    shared: storages that several tensors have, so that no receiver may write them.
    held: storages of the sender's parameters and buffers, which no receiver may write either.
    """
    sources: Sequence[Tensor | None] = (*values, *skips) if skips else values
    sources = [tensor if tensor is None else _source(tensor) for tensor in sources]
    packed = PartitionInput(
        tuple([None if tensor is None else _handed_over(tensor, held) for tensor in sources]),
        tuple([tensor is not None and tensor.requires_grad for tensor in sources]),
        template,
        len(values),
        frozenset([place for place, each in enumerate(sources) if _is_read_only(each, shared, held)]),
    )
    return packed, sources


def _is_read_only(tensor: Tensor | None, shared: Collection[int], held: Collection[int]) -> bool:
    if tensor is None:
        return False
    if is_view(tensor) and tensor.requires_grad:
        # Autograd would pass the gradient of a written view to the view's base, past all other uses of the view.
        return True
    return bool(shared or held) and (storage_of(tensor) in shared or storage_of(tensor) in held)


def _source(tensor: Tensor) -> Tensor:
    """The tensor as autograd tracks it; raise for one that has no memory of its own to hand over."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor with layout {tensor.layout} cannot cross to another partition. Call to_dense() on it in the "
            "layer that returns it, or put both layers into one partition"
        )
    return tensor.detach() if is_untracked_view(tensor) else tensor


def _handed_over(tensor: Tensor, held: Collection[int]) -> Tensor:
    # The sender's next micro-batch may change a buffer while the receiver reads it.
    changes = bool(held) and not tensor.requires_grad and storage_of(tensor) in held
    return tensor.clone() if changes else _resolved(tensor.detach())


def shared_memory_written(by: str) -> RuntimeError:
    return RuntimeError(
        f"{by} writes in place a tensor whose memory also belongs to another one: a skip, a view or its base, or a "
        "parameter or buffer of another partition. The gradient of the other one would be wrong. Send or stash a "
        "clone, or do not write in place (perhaps a ReLU with inplace=True)"
    )


def common_storages(tensors: Sequence[Tensor]) -> set[int]:
    """The storages that several of the tensors have in common."""
    if len(tensors) == 1:
        return set()
    counts = Counter(storage_of(each) for each in tensors if each.layout is torch.strided and each.numel())
    return {storage for storage, count in counts.items() if count > 1}


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


_ENTRY = node_type(_Entry)


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
class GraphLeakDetector:
    """Detects a path from a partition's graph to the sink or to a parameter of another partition."""

    def __init__(
        self, sink: GradSink, holders: Mapping[Tensor, Sequence[int]], layers: Sequence[Layer]
    ) -> None:
        """holders: the positions of the layers that hold each parameter; layers: those of the partition."""
        self._sink = sink
        self._holders = holders
        self._own = range(layers[0].position, layers[-1].position + 1) if layers else range(0)
        self._visited: set[Any] = {None}

    def check(self, layer: Layer, value: Any) -> None:
        """Raise if the graph of `value`, which `layer` returned, leads out of the partition."""
        visited = self._visited
        nodes: list[Any] = [graph_behind(tensor) for tensor in _tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node in visited:
                continue
            visited.add(node)
            # Every node of the partition passes here, so it is told by its type: asking for attributes takes longer.
            kind = type(node)
            if (kind is _ENTRY and node.sink is not self._sink) or (
                kind is ACCUMULATE_GRAD and self._is_foreign(node.variable)
            ):
                raise RuntimeError(
                    f"layer {layer!r} used a tensor of another partition or micro-batch that was not handed to it, "
                    "so its gradient would be lost. Hand it over with @skippable (see gpipe_cli.skip), or put both "
                    "layers into one partition"
                )
            nodes += [following for following, _ in node.next_functions]

    def _is_foreign(self, leaf: Tensor) -> bool:
        """Whether only layers of other partitions hold a parameter."""
        places = self._holders.get(leaf)
        return places is not None and not any(place in self._own for place in places)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value that may hold anything, because it need not leave the partition."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)
