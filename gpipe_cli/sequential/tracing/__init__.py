"""Any model as a sequence, by recording what it does."""

from gpipe_cli.sequential.tracing.convert import to_sequential

__all__ = ["to_sequential"]
