"""Gradients of a model whose partitions and replicas are in several processes: averaged, and clipped by their norm.

In a pipe a process runs several forwards before the first backward. Wrappers that count on a backward after each
forward then leave gradients unreduced, so a partition inside such a wrapper is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpipe_cli.distributed.gradient_buckets import summed_gradients
from gpipe_cli.distributed.groups import DATA, PIPE, device_of, get_group
from gpipe_cli.distributed.world import sum_of_numbers
from gpipe_cli.errors import ConfigError, NumericError
from gpipe_cli.torch_internals.gradient_reducers import noticing_reducers


@torch.no_grad()
def average_gradients(parameters: Tensor | Iterable[Tensor], rows: int | None = None) -> None:
    """Replace each gradient by its mean over the group `data`; every process of the group calls it.

    Call it once per step, when `forward_backward` has returned and before gradients are clipped. Give `rows`, the rows
    of this replica's batch, where they may differ: then every row of all batches counts once. A gradient that some
    replicas do not have counts as zero there; one that none has stays None.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not own:  # nor does any other process of the group, because they hold the same layers
        return
    if any(hasattr(parameter, "full_tensor") for parameter in own):
        raise ConfigError(
            "average_gradients: these parameters are sharded, by fully_shard for example, "
            "which averages gradients itself; remove average_gradients"
        )
    group = get_group(DATA)
    share = 1 / distributed.get_world_size(group)
    if rows is not None:
        share = rows / float(sum_of_numbers(torch.tensor([rows]), group))
    for parameter in own:
        # Scaled before the sum, because replicas with unequal rows have unequal shares.
        if parameter.grad is not None:
            parameter.grad.mul_(share)
    for parameter, gradient in summed_gradients(own, group):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.copy_(gradient)


def _refuse(wrapper: nn.Module) -> None:
    raise ConfigError(
        f"fwd_fn: {type(wrapper).__name__} around the layers of a pipe gives wrong gradients, since several "
        "micro-batches are under way at once; remove it and call "
        "gpipe_cli.distributed.average_gradients(model.parameters()) after forward_backward"
    )


refusing_reducers = partial(noticing_reducers, _refuse)
"""Raises ConfigError where this thread, inside the block, calls a wrapper that gives wrong gradients in a pipe."""


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Do what `torch.nn.utils.clip_grad_norm_` does on the whole model; call it in every process of the pipe.

    Returns the norm before clipping. A parameter that several processes share is counted by each of them.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    norm = get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
    # For parameters that fully_shard has divided it is a DTensor; importing that class to ask for it would be slow.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm = _pipe_norm(norm, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NumericError(f"the gradient norm over all processes of the pipe is {float(norm)}")
    if gradients:
        clip_grads_with_norm_(own, max_norm, norm.to(gradients[0].device))
    return norm


def _pipe_norm(norm: Tensor, norm_type: float) -> Tensor:
    """Combine the norms of all processes: powers add up, norms do not; infinity norms take the maximum."""
    largest = math.isinf(norm_type)
    group = get_group(PIPE)
    # On the device of the group, because a process without gradients has its norm on the CPU. In double precision: the
    # square of a large float32 norm overflows.
    powers = norm.to(device_of(group), torch.float64)
    powers = powers if largest else powers**norm_type
    operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    distributed.all_reduce(powers, op=operation, group=group)
    return (powers if largest else powers ** (1 / norm_type)).to(norm.dtype)
