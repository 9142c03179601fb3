"""Models as sequences of layers that keep the original parameter names."""

from gpipe_cli.sequential.by_list import flatten_model, partition_uniform
from gpipe_cli.sequential.by_tracing import to_sequential
from gpipe_cli.sequential.sequence import Sequence, layer_class, layer_names, original_output

__all__ = [
    "Sequence",
    "flatten_model",
    "layer_class",
    "layer_names",
    "original_output",
    "partition_uniform",
    "to_sequential",
]
