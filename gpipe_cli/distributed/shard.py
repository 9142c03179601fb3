"""The part of a model that stays in this process.

Every process builds the whole model, so that all agree on its names and its numbers, and then keeps the tensors of its
own layers only. The others stay in their places without storage: names, shapes and who shares what remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from gpipe_cli.sequential.meta_clone import meta_like

__all__ = ["keep_only"]


def keep_only(module: nn.Sequential, own: Sequence[nn.Module], device: torch.device) -> None:
    """Move the layers in `own` to `device` and let go of every tensor that none of them uses."""
    for layer in own:
        layer.to(device)
    kept = {id(tensor) for layer in own for tensor in chain(layer.parameters(), layer.buffers())}
    twins: dict[int, Tensor] = {}
    # They live until all are replaced: one that several places share must be recognised at each of them.
    replaced: list[Tensor] = []
    for part in module.modules():
        held = chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in list(held):
            if id(tensor) not in kept and not tensor.is_meta:
                replaced.append(tensor)
                twin = twins.setdefault(id(tensor), meta_like(tensor))
                setattr(part, name, twin)
