"""A model that is run to be measured, and is afterwards what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gpipe_cli.pipeline.buffers import all_buffers, restore, save

__all__ = ["left_as_found"]


@contextmanager
def left_as_found(module: nn.Module) -> Iterator[None]:
    """Train mode inside; afterwards modes, buffers and gradients are what they were."""
    modes = [(one, one.training) for one in module.modules()]
    buffers = save(all_buffers([module]))
    module.train()
    try:
        yield
    finally:
        restore(buffers)
        for parameter in module.parameters():
            parameter.grad = None
        for one, training in modes:
            one.training = training
