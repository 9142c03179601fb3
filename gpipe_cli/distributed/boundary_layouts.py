"""How tensors that cross between partitions lie in memory: they arrive with the strides and the alignment they had.

Both decide which kernels run, and with them the bits of results. torch's schedules carry contiguous memory only, and
how an output or a gradient lies is known only once it is computed. So its sender says it in a store, on the host, the
first time that a schedule runs; from then on both ends remember it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not re-exported

from gpipe_cli.torch_internals.tensor_memory import ALIGNMENT

Layout = list[int] | None
"""How many elements behind an aligned address a tensor begins, then its strides; None if contiguous and aligned."""


@final
class BoundaryLayouts:
    """Those of one stage. A place names a boundary, what crosses it, and the micro-batch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, list[Layout]] = {}

    def pack(self, place: str, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Contiguous tensors to send. One that lies otherwise than the first in its place arrives as the first did."""
        layouts = self._known.get(place)
        if layouts is None:
            layouts = self._known[place] = [None if each is None else _layout(each) for each in tensors]
            self._store.set(place, json.dumps(layouts))
        pairs = zip(tensors, layouts, strict=True)
        return tuple([None if tensor is None else _packed(tensor, layout) for tensor, layout in pairs])

    def unpack(self, place: str, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """What was packed, as it lay before; detached."""
        layouts = self._known.get(place)
        if layouts is None:
            layouts = self._known[place] = json.loads(self._store.get(place))
            self._store.delete_key(place)
        pairs = zip(tensors, layouts, strict=True)
        return tuple([None if tensor is None else _unpacked(tensor, layout) for tensor, layout in pairs])


def _layout(tensor: Tensor) -> Layout:
    layout = [tensor.data_ptr() % ALIGNMENT // tensor.itemsize, *tensor.stride()]
    # Not is_contiguous: the strides of dimensions of size 1 tell kernels whether an image is channels_last.
    return None if layout == [0, *torch.empty(tensor.shape, device="meta").stride()] else layout


def _packed(tensor: Tensor, layout: Layout) -> Tensor:
    # No copy if the elements fill their memory, in whichever order.
    return (
        tensor.contiguous() if layout is None else tensor.permute(_order(layout)).contiguous().view_as(tensor)
    )


def _unpacked(tensor: Tensor, layout: Layout) -> Tensor:
    tensor = tensor.detach()
    if layout is None:
        return tensor
    order, strides = _order(layout), layout[1:]
    tensor = tensor.view([tensor.shape[each] for each in order]).permute(
        [*map(order.index, range(len(order)))]
    )
    if layout != [0, *tensor.stride()]:
        # It had gaps, or elements under several names, or began elsewhere: what is before [1] is the offset.
        memory = torch.empty_strided((2, *tensor.shape), layout, dtype=tensor.dtype, device=tensor.device)
        # torch refuses to write an expanded dimension, whose elements are all one.
        first = [slice(None if stride else 1) for stride in strides]
        memory[1, *first].copy_(tensor[*first])
        tensor = memory[1]
    # No view, so that a layer may write it in place as it would write any output.
    return tensor.detach()


def _order(layout: list[int]) -> list[int]:
    """The dimensions from the outermost to the innermost in memory."""
    _, *strides = layout
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
