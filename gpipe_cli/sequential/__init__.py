"""Models as sequences of layers that keep the original parameter names."""

from gpipe_cli.sequential.sequence import Sequence

__all__ = ["Sequence"]
