"""The paths in the settings of a run: absolute in config.yaml, so that the run works from any folder.

paths.json has them relative to the run, and the folder that it was started in, for a project that moves with its runs.
Imports no torch.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

from omegaconf import DictConfig, OmegaConf

from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.config.targets import add_current_folder
from gpipe_cli.config.words import sets_key
from gpipe_cli.errors import RunError
from gpipe_cli.launch.rank import is_main_process
from gpipe_cli.report.output import print_status
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.values import flatten

PATHS = "paths.json"
MAX_PATHS_BYTES = 2**20
FOLDER = "folder"


@final
@dataclass(frozen=True)
class SavedPlace:
    saved: str
    """The absolute path in config.yaml."""
    found: str
    """The path to use: the one as far from the run directory as the saved one was, if only that exists."""

    @property
    def is_gone(self) -> bool:
        return not _exists(self.saved)


def saved_places(run: Path) -> dict[str, SavedPlace]:
    """Where the files and folders that the configuration names are, by their keys; none for an older run.

    FOLDER: the folder that the run was started in.
    """
    try:
        places = {}
        for key, (saved, near) in parse_json(read_regular(run / PATHS, MAX_PATHS_BYTES, base=run)).items():
            place = SavedPlace(saved, os.path.normpath(run.absolute() / near))
            places[key] = place if place.is_gone and _exists(place.found) else SavedPlace(saved, saved)
        return places
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(
            f"{run / PATHS}: cannot be used: {error}; remove it if the paths in config.yaml exist"
        ) from error


def _exists(path: str) -> bool:
    """Whether there is such a file, or one that fits the pattern."""
    matches = glob.glob(path)  # noqa: PTH207 - an absolute pattern; a link to nothing matches itself
    return any(Path(each).exists() for each in (path, *matches))


def use_found_paths(tree: DictConfig, run: Path) -> None:
    """Put the paths that exist now into the saved settings of a run, and say which ones."""
    values = dict(flatten(OmegaConf.to_container(tree), inner=True))
    for key, place in saved_places(run).items():
        if values.get(key) == place.saved != place.found:
            OmegaConf.update(tree, key, place.found)
            if is_main_process():
                print_status(
                    f"{key}={place.found}: used instead of {place.saved}, which does not exist any more"
                )


def search_code(run: Path, settings: ModelConfig, overrides: Sequence[str]) -> None:
    """Make importable what the command line allows: in the current folder, then in the one the run was started in.

    GPIPE_ALLOW alone does not: it is no word about this run, which may have come from anywhere with code of its own.
    """
    add_current_folder(settings.allow)
    folder = saved_places(run).get(FOLDER)
    if folder is None or not sets_key(overrides, "allow"):
        return
    for package in settings.allow:
        root = package.partition(".")[0]
        if root not in sys.modules and folder.found not in sys.path and find_spec(root) is None:
            sys.path.append(folder.found)
            if is_main_process():
                print_status(
                    f"{package}: not in this folder; searching {folder.found}, where the run was started"
                )
