"""Models as sequences of layers that keep the original parameter names."""

from gpipe_cli.sequential.sequence import Sequence, layer_names

__all__ = ["Sequence", "layer_names"]
