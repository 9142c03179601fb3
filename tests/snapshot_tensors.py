"""Reads the tensors of a snapshot, whichever number of ranks wrote it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def snapshot_tensors(snapshot: Path, kind: str = "model") -> dict[str, Tensor]:
    """kind: model, optimizer or buffers."""
    files = sorted(snapshot.glob(f"{kind}*.safetensors"))
    assert files, f"{snapshot} has no file of the kind {kind}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
