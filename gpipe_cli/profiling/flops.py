"""Floating-point operations of each layer, as torch's own counter counts them.

Decides which layer an operation of backward belongs to. Autograd, on one thread, takes what was computed last
first: all of a layer's backward is done before that of the layer before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli.torch_internals.attention_flops import ATTENTION_ON_CPU

__all__ = ["FlopsPerLayer", "LayerFlops", "flop_counter"]

Shape = tuple[int, ...]


@final
@dataclass(frozen=True)
class LayerFlops:
    """Of one micro-batch."""

    forward: int
    backward: int


def flop_counter() -> FlopCounterMode:
    """torch's own, put right where it is silent or wrong."""
    return FlopCounterMode(
        display=False,
        custom_mapping={**ATTENTION_ON_CPU, torch.ops.aten.convolution_backward: _convolution_backward},
    )


def _convolution_backward(
    gradient: Shape,
    input: Shape,
    weight: Shape,
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    wanted: Sequence[bool],
    **options: Any,
) -> int:
    """As much as the forward for each of the gradients of input and weight; torch's formula forgets the groups."""
    places = (input if transposed else gradient)[2:]
    return 2 * gradient[0] * prod(places) * prod(weight) * sum(wanted[:2])


@final
class FlopsPerLayer:
    """Divides what a counter counts among the layers of a forward, and of the backward that follows."""

    def __init__(self, layers: int, total: Callable[[], int]) -> None:
        """`total` reads the counter."""
        self._total = total
        self._before = total()
        self._forward = [0] * layers
        self._backward = [0] * layers
        self._current = layers - 1

    def ran(self, layer: int, *outputs: Tensor) -> None:
        """Whatever was counted since the last call is this layer's forward.

        When the gradient of any of its outputs is there, backward has come to it. To be told at once: a tensor
        that the next layer writes in place counts as that one's output from then on.
        """
        self._forward[layer] += self._since()
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda gradient: self._enter(layer))  # type: ignore[no-untyped-call]

    def finish(self) -> tuple[LayerFlops, ...]:
        """After the backward."""
        self._enter(0)
        return tuple(map(LayerFlops, self._forward, self._backward))

    def _enter(self, layer: int) -> None:
        self._backward[self._current] += self._since()
        # A layer may hand on the very tensor it got: then both of them are told, the earlier one first.
        self._current = min(self._current, layer)

    def _since(self) -> int:
        now = self._total()
        counted, self._before = now - self._before, now
        return counted
