"""Gradients of the replicas of a partition: averaged by `average_gradients`, and by nobody else in between.

In a pipe a process runs several forwards before the first backward. Wrappers that count on a backward after each
forward then leave gradients unreduced, so a partition that is wrapped in one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.exchange import sum_of_numbers
from gpipe_cli.distributed.groups import DATA, get_group
from gpipe_cli.distributed.replicas import summed_gradients
from gpipe_cli.errors import ConfigError
from gpipe_cli.torch_internals.gradient_reducers import noticing_reducers

__all__ = ["average_gradients", "refusing_reducers"]


@torch.no_grad()
def average_gradients(parameters: Tensor | Iterable[Tensor], rows: int | None = None) -> None:
    """Replace each gradient by its mean over the group `data`; every process of the group calls it.

    Call it once per step, when `forward_backward` has returned and before gradients are clipped. Give `rows`, the rows
    of this replica's batch, where they may differ: then every row of all batches counts once. A gradient that some
    replicas do not have counts as zero there; one that none has stays None.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not own:  # nor has any other process of the group: they hold the same layers
        return
    if any(hasattr(parameter, "full_tensor") for parameter in own):
        raise ConfigError(
            "average_gradients: these parameters are sharded, by fully_shard for example, "
            "which averages gradients itself; leave average_gradients out"
        )
    group, device = get_group(DATA), own[0].device
    share = 1 / distributed.get_world_size(group)
    if rows is not None:
        share = rows / float(sum_of_numbers(torch.tensor([rows]), group, device))
    for parameter in own:
        if parameter.grad is not None:
            parameter.grad.mul_(share)
    for parameter, gradient in summed_gradients(own, group, device):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.copy_(gradient)


@contextmanager
def refusing_reducers() -> Iterator[None]:
    """Raise ConfigError where this thread, inside the block, calls a wrapper that gives wrong gradients in a pipe."""
    with noticing_reducers(_refuse):
        yield


def _refuse(wrapper: nn.Module) -> None:
    raise ConfigError(
        f"fwd_fn: {type(wrapper).__name__} around the layers of a pipe gives wrong gradients, since several "
        "micro-batches are under way at once; leave it out and call "
        "gpipe_cli.distributed.average_gradients(model.parameters()) after forward_backward"
    )
