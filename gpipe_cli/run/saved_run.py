"""The configuration a run was started with, read back, and what is given anew put on top of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.composing import refuse_hydra
from gpipe_cli.config.yaml_files import load_yaml
from gpipe_cli.errors import ConfigError, RunError


def saved_config(run: Path) -> DictConfig:
    """config.yaml of a run directory: data, nothing of it is executed."""
    path = run / "config.yaml"
    try:
        tree = load_yaml(path, base=run)
    except FileNotFoundError as error:
        raise RunError(f"{run}: is no run directory, it has no config.yaml") from error
    except ConfigError as error:
        raise RunError(str(error)) from error
    if not isinstance(tree, DictConfig):
        raise RunError(f"{path}: is no configuration")
    refuse_hydra(tree, str(path))
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
            OmegaConf.update(result, path, _unresolved(now, path), force_add=True)
    return result


def _unresolved(tree: Any, path: str) -> Any:
    """The value of a dotted key as it was given: what a reference stands for may be a secret."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
