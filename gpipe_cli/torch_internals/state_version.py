"""The versions that a state_dict carries beside its tensors, by module path.

A module's loader may read the version and convert older state: torchvision's MNASNet rebuilds itself where it has
none. torch keeps both names private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def adopt_version(module: nn.Module, original: nn.Module) -> None:
    """Make state that `module` saves carry the version of `original`."""
    module._version = original._version


def repeat_versions(state_dict: dict[str, Any], prefix: str, original_path: Callable[[str], str]) -> None:
    """Add the version of each module below `prefix` under its original path too."""
    versions: dict[str, Any] = getattr(state_dict, "_metadata", {})
    for path in [path for path in versions if path.startswith(prefix) and path != prefix]:
        versions.setdefault(prefix + original_path(path.removeprefix(prefix)), versions[path])
