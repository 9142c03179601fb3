"""format=safetensors: the file of weights that a snapshot contains, verified and copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, ResourceError, RunError
from gpipe_cli.run.base_weights import base_of_snapshot
from gpipe_cli.tensor_files.header import BadTensors, read_header
from gpipe_cli.training.snapshot.durable import write_file
from gpipe_cli.training.snapshot.manifest import MODEL, VerifiedSnapshot


def write(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    if base_of_snapshot(snapshot) is not None:
        raise ConfigError(
            f"format=safetensors: {snapshot.path} has only the adapter of a model; give format=peft out=<directory>"
        )
    weights = snapshot.contents[MODEL]
    try:
        read_header(weights, len(weights))
    except BadTensors as error:
        raise RunError(f"{snapshot.path / MODEL}: damaged: {error}") from error
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, [weights], replace=False)
    except OSError as error:
        raise ResourceError(f"out={out}: cannot be written: {error}") from error
    return {"bytes": out.stat().st_size, "sha256": snapshot.manifest.files[MODEL].sha256}
