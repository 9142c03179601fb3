"""References to environment variables in a configuration: resolved as OmegaConf does, and remembered."""

from __future__ import annotations

from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from gpipe_cli.redaction import remember

__all__ = ["watch_environment"]


@cache
def watch_environment() -> None:
    """From now on every value that a reference stands for is kept out of files."""
    OmegaConf.register_new_resolver("oc.env", _resolved, replace=True)


def _resolved(name: str, *default: Any) -> Any:
    value = oc.env(name, *default)
    remember(name, value)
    return value
