"""Any model that torch.fx can trace becomes a Sequence: see `convert`."""

from gpipe_cli.sequential.by_tracing.convert import to_sequential

__all__ = ["to_sequential"]
