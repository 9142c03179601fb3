"""Models as sequences of layers that keep the original parameter names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli import lazy_attributes

if TYPE_CHECKING:
    from gpipe_cli.sequential.by_list import flatten_model, listed_layers, partition_uniform
    from gpipe_cli.sequential.sequence import LayerSequence, layer_class, layer_names, original_output
    from gpipe_cli.sequential.tracing.convert import to_sequential

__all__ = [
    "LayerSequence",
    "flatten_model",
    "layer_class",
    "layer_names",
    "listed_layers",
    "original_output",
    "partition_uniform",
    "to_sequential",
]

# Lazy: few of the files that need a name from here need the tracer.
__getattr__ = lazy_attributes(
    __name__,
    {
        "LayerSequence": "sequence",
        "flatten_model": "by_list",
        "layer_class": "sequence",
        "layer_names": "sequence",
        "listed_layers": "by_list",
        "original_output": "sequence",
        "partition_uniform": "by_list",
        "to_sequential": "tracing.convert",
    },
)
