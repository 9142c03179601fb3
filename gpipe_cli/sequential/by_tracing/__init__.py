"""Models that torch.fx can trace, as sequences."""

from gpipe_cli.sequential.by_tracing.convert import to_sequential

__all__ = ["to_sequential"]
