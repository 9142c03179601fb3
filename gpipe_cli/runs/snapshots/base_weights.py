"""The frozen parameters of a run that stay in the files of its base model: snapshots refer to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.errors import RunError
from gpipe_cli.huggingface import CONFIG
from gpipe_cli.runs.snapshots.manifest import VerifiedSnapshot
from gpipe_cli.runs.snapshots.record import BaseFiles, digest_files
from gpipe_cli.sequential.deferred import DeferredParameter


@final
@dataclass
class BaseWeights:
    directory: Path
    """`model.path`."""
    files: frozenset[str]
    """The names, in the directory, of the files that these parameters depend on."""
    parameters: frozenset[str]
    """By all their names in a state_dict."""
    verified: BaseFiles | None = None
    """What a snapshot says of the files, if the run resumes from one."""

    def digests(self) -> BaseFiles:
        """Read all files, unless a snapshot was compared with them."""
        if self.verified is not None:
            return BaseFiles(str(self.directory), self.verified.files)
        return digest_files(self.directory, self.files)


def base_weights(settings: ModelConfig, model: nn.Module) -> BaseWeights | None:
    """The base weights of a model that loads frozen parameters later; None if it has no such parameters."""
    frozen = {
        name: parameter
        for name, parameter in model.state_dict(keep_vars=True).items()
        if isinstance(parameter, DeferredParameter) and not parameter.requires_grad
    }
    if not frozen or "path" not in settings.model:
        return None
    directory = Path(settings.model["path"])
    files = {file.name for parameter in frozen.values() for file in parameter.files}
    # What the layers compute with these parameters depends on the configuration.
    return BaseWeights(directory, frozenset({CONFIG, *files}), frozenset(frozen))


def check_base(base: BaseFiles | None, model: Mapping[str, Any], snapshot: Path, *, contents: bool) -> None:
    """Raise RunError unless `model.path` has the files that the snapshot refers to.

    model: the keys of the model.
    contents: compare digests, which reads the files; otherwise only sizes.
    """
    if base is not None:
        try:
            base.check(Path(model.get("path", base.directory)), contents=contents)
        except RunError as error:
            raise RunError(f"{snapshot}: {error}") from error


def base_of_snapshot(snapshot: VerifiedSnapshot) -> BaseFiles | None:
    if "base" not in snapshot.manifest.record:
        return None
    try:
        return BaseFiles.from_json(snapshot.manifest.record["base"])
    except ValueError as error:
        raise RunError(f"{snapshot.path}: damaged: {error}") from error
