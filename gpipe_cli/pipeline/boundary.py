"""Where one partition's graph ends and the next one's begins.

Decides what crosses: detached tensors and whether each takes part in backward; and how gradients cross
back. A layer gets a copy-free successor of the received tensor that is no leaf, so it may work in place.
Knows nothing of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.torch_internals.function import apply

__all__ = ["ANCHOR", "Gradients", "Mailbox", "Parcel", "enter", "roots_of"]

Gradients = tuple[Tensor | None, ...]
"""One gradient per tensor of a parcel; None where there is none."""

ANCHOR = torch.zeros(0, requires_grad=True)
"""Makes autograd track what enters a partition. It never gets a gradient, so all partitions share it."""


class Parcel(NamedTuple):
    """Detached tensors on their way to a partition: the value a layer returned, then skips."""

    tensors: tuple[Tensor | None, ...]
    """None stands for a skip that was stashed as None."""
    needs_grad: tuple[bool, ...]
    single: bool
    """Whether the value is a bare tensor or a tuple."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], single: bool) -> Parcel:
        return cls(
            tuple(tensor if tensor is None else tensor.detach() for tensor in tensors),
            tuple(tensor is not None and tensor.requires_grad for tensor in tensors),
            single,
        )

    @property
    def value(self) -> Value:
        """For a parcel without skips."""
        return self.tensors[0] if self.single else self.tensors  # type: ignore[return-value]

    @property
    def present(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor is not None)

    def cloned(self) -> Parcel:
        tensors = tuple(tensor if tensor is None else tensor.clone() for tensor in self.tensors)
        return Parcel(tensors, self.needs_grad, self.single)


@final
class Mailbox:
    """Where the backward of a partition leaves the gradients of what entered it."""

    __slots__ = ("_open", "_places", "gradients")

    def __init__(self, needs_grad: tuple[bool, ...]) -> None:
        self._places = tuple(place for place, needed in enumerate(needs_grad) if needed)
        self._open = False
        self.gradients: list[Tensor | None] = [None] * len(needs_grad)

    def __enter__(self) -> Mailbox:
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False

    def fill(self, gradients: tuple[Tensor | None, ...]) -> None:
        if not self._open:
            # Another partition's backward came here through a tensor that did not cross a boundary.
            raise RuntimeError(
                "a layer used a tensor of another partition that was not handed to it, so its gradient "
                "would be lost. Hand it over with @skippable (see gpipe_cli.skip)"
            )
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
    """Identity without a copy. `detach` makes an output that autograd does not take for a view: it may be
    written in place."""

    @staticmethod
    def forward(ctx: Any, mailbox: Mailbox, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mailbox = mailbox
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.mailbox.fill(gradients)
        return (None,) * (2 + len(gradients))


def enter(parcel: Parcel, mailbox: Mailbox) -> tuple[Tensor | None, ...]:
    """The parcel's tensors as a partition's layers get them; their gradients will be in `mailbox`."""
    if all(parcel.needs_grad):
        return tuple(apply(_Entry, mailbox, ANCHOR, *parcel.tensors))
    needing = [tensor for tensor, needed in zip(parcel.tensors, parcel.needs_grad, strict=True) if needed]
    if not needing:
        return parcel.tensors
    entered = iter(apply(_Entry, mailbox, ANCHOR, *needing))
    return tuple(
        next(entered) if needed else tensor
        for tensor, needed in zip(parcel.tensors, parcel.needs_grad, strict=True)
    )


def roots_of(tensors: Sequence[Tensor | None]) -> tuple[GradientEdge | None, ...]:
    """Where backward begins for each tensor. Edges, not tensors: the sender keeps no activation it does
    not need.
    """
    return tuple(
        [None if tensor is None or not tensor.requires_grad else _edge(tensor) for tensor in tensors]
    )


def _edge(tensor: Tensor) -> GradientEdge:
    # torch's own function checks what is known here; only a leaf needs it, to be given its accumulator.
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)
