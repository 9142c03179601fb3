"""A model as a sketch: all its layers, none of its numbers. For what is said of a model without running it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from gpipe_cli.profiling.without_storage import without_storage
from gpipe_cli.report.output import say
from gpipe_cli.sequential.meta_clone import meta_clone

__all__ = ["sketched"]


def sketched(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    """What `make` builds, on the meta device; built with storage first only where it cannot be helped."""
    try:
        with without_storage(), warnings.catch_warnings():
            # A file of weights is read, to see that it fits, but there is nothing to load it into.
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            model = make()
    except RuntimeError as error:  # also NotImplementedError, which it is the parent of
        say(f"the model is built with storage, because its constructor needs values: {error}")
        model = make()
    clone = meta_clone(model)
    assert isinstance(clone, nn.Sequential), "a copy is what it was copied from"
    return clone
