"""Gradients clipped by the norm of the whole model, of which each process of a pipe holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from gpipe_cli.distributed.groups import PIPE, get_group
from gpipe_cli.errors import NumericError

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` would on the whole model; every process of the pipe calls it.

    The norm before clipping is returned. A parameter that several processes share is counted by each of them.
    """
    own = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [one.grad for one in own if one.grad is not None]
    norm = get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
    # Of parameters that fully_shard has divided among the replicas it is a DTensor, a class that takes long to import.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm = _over_the_pipe(norm, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NumericError(f"the gradient norm over all processes of the pipe is {float(norm)}")
    if gradients:
        clip_grads_with_norm_(own, max_norm, norm.to(gradients[0].device))
    return norm


def _over_the_pipe(norm: Tensor, norm_type: float) -> Tensor:
    """Powers add up, norms do not; of the largest entries the largest counts."""
    largest = math.isinf(norm_type)
    powers = norm.to(torch.float64) if largest else norm.to(torch.float64) ** norm_type
    operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    distributed.all_reduce(powers, op=operation, group=get_group(PIPE))
    return (powers if largest else powers ** (1 / norm_type)).to(norm.dtype)
