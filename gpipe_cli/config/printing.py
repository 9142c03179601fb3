"""What --cfg, --info and --hydra-help print; Hydra's own answers, over our way to compose."""

from __future__ import annotations

from argparse import Namespace
from contextlib import redirect_stderr
from io import StringIO

from hydra._internal.utils import get_args_parser

from gpipe_cli.config.composing import composer
from gpipe_cli.config.load import Composition
from gpipe_cli.errors import ConfigError

__all__ = ["print_config"]


def print_config(
    composition: Composition, cfg: str | None, info: str | None, package: str | None, *, resolve: bool
) -> None:
    """The values of the flags of those names; Hydra's help where neither `cfg` nor `info` is given."""
    name, overrides = composition.config_name, list(composition.overrides)
    with composer(composition.request.command, composition.request.config_dir) as hydra:
        if cfg is not None:
            try:
                with redirect_stderr(StringIO()):
                    hydra.show_cfg(name, overrides, cfg, package, resolve)
            except SystemExit as ended:
                raise ConfigError(f"--package {package}: no such part of the configuration") from ended
        elif info is not None:
            hydra.show_info(info, config_name=name, overrides=overrides)
        else:
            hydra.hydra_help(name, get_args_parser(), Namespace(overrides=[]))
