"""A model that is run to be measured, and is afterwards what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gpipe_cli.pipeline.buffers import all_buffers, restore, save

__all__ = ["left_as_found", "staying_at_home"]


@contextmanager
def left_as_found(module: nn.Module) -> Iterator[None]:
    """Train mode inside; afterwards modes, buffers and gradients, of which there may be none, are what they were."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
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


@contextmanager
def staying_at_home(module: nn.Module) -> Iterator[None]:
    """A pipe moves its layers to its devices; afterwards they are on the device they came from."""
    home = next((parameter.device for parameter in module.parameters()), None)
    try:
        yield
    finally:
        if home is not None:
            module.to(home)
