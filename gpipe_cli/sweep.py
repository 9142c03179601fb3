"""A sweep, or a job with keys of Hydra: Hydra's sweeper and launcher run it, and each job is composed as one alone is.

Hydra gets the words that differ between the jobs, and those that configure it. A job composes its own words, so that
the same words mean the same in a sweep and alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import hydra
from hydra.conf import HydraConf

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.compose import Request, prepared
from gpipe_cli.config.messages import config_errors
from gpipe_cli.config.sources import VERSION
from gpipe_cli.config.words import sets_hydra
from gpipe_cli.errors import ConfigError


def ask_hydra(request: Request, invocation: Invocation) -> None:
    """gpipe <command> --cfg hydra|all, --info or --hydra-help: Hydra's own answers."""
    flags = ["--hydra-help"] if invocation.hydra_help else []
    flags += [] if invocation.info is None else ["--info", invocation.info]
    flags += [] if invocation.cfg is None else ["--cfg", invocation.cfg]
    flags += ["--resolve"] if invocation.resolve else []
    flags += [] if invocation.package is None else ["--package", invocation.package]
    own = [word for word in request.words if sets_hydra(word)]
    with prepared(request, HydraConf()) as (primary, words, _, _):
        _hydra_main(request.command, primary, _nothing, [*flags, *words, *own])


def run_with_hydra(request: Request, invocation: Invocation, began: float) -> int:
    raise ConfigError("sweeps are being rebuilt")


def _nothing(config: Any) -> None:
    raise AssertionError("Hydra prints, and runs nothing")


def _hydra_main(command: str, primary: str | None, task: Callable[[Any], Any], words: Sequence[str]) -> None:
    # Hydra exits after its help.
    with config_errors(command), _arguments([f"gpipe {command}", *words]), suppress(SystemExit):
        hydra.main(config_path=None, config_name=primary, **VERSION)(task)()


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """Hydra reads its words from sys.argv, and raises instead of printing a traceback if this variable is set."""
    argv, variable = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = words, "1"
    try:
        yield
    finally:
        sys.argv = argv
        if variable is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = variable
