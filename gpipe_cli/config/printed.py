"""gpipe <command> --cfg job [--package P] [--resolve]: print the composed configuration."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import Container, OmegaConf

from gpipe_cli.config.compose import Request, compose_tree
from gpipe_cli.config.messages import config_errors
from gpipe_cli.errors import ConfigError


def print_config(request: Request, package: str | None, *, resolve: bool) -> None:
    shown: Any = compose_tree(request)
    with config_errors(request.command):
        if package not in (None, "_global_"):
            shown = OmegaConf.select(shown, str(package))
            if shown is None:
                raise ConfigError(f"--package {package}: no such part of the configuration")
        if not isinstance(shown, Container):
            sys.stdout.write(f"{shown}\n")
            return
        if resolve:
            OmegaConf.resolve(shown)
        header = f"# @package {package}\n" if package not in (None, "_global_") else ""
        sys.stdout.write(f"{header}{OmegaConf.to_yaml(shown)}")
