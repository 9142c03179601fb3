"""The configuration a run was started with, read back, and what is given anew put on top of it."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import read_regular

LARGEST = 2**20
"""Bytes of a config.yaml; gpipe writes a few thousand."""


def saved_config(run: Path) -> DictConfig:
    """config.yaml of a run directory: data, nothing of it is executed."""
    path = run / "config.yaml"
    try:
        tree = OmegaConf.load(io.StringIO(read_regular(path, LARGEST, base=run).decode()))
    except FileNotFoundError as error:
        raise RunError(f"{run}: is no run directory, it has no config.yaml") from error
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise RunError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, DictConfig):
        raise RunError(f"{path}: is no configuration")
    return tree


def with_overrides(
    saved: DictConfig, composed: DictConfig, overrides: Sequence[str], own: Collection[str] = ()
) -> DictConfig:
    """The composed tree with all its keys as saved, except those the overrides speak of, and the command's own.

    An option chosen anew (`balance=uniform`) replaces the whole component, a key (`chunks=2`) that key.
    """
    given = [*own, *(word.lstrip("+~").partition("=")[0] for word in overrides)]
    # As text, references and all: they are resolved later, where a mistake in them is told as one.
    before, now = OmegaConf.to_container(saved), OmegaConf.to_container(composed)
    assert isinstance(before, dict) and isinstance(now, dict)
    result = OmegaConf.create(
        {key: before[key] if key in before and key not in given else now[key] for key in now}
    )
    for path in given:
        if "." in path and path.partition(".")[0] not in given:
            OmegaConf.update(result, path, OmegaConf.select(composed, path), force_add=True)
    return result
