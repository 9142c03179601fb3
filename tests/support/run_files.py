"""Reads what a run wrote: the rows of metrics.jsonl, and the tensors of its snapshots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor


def rows(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def weights(run: str | Path) -> dict[str, Tensor]:
    """The model's tensors in the only snapshot of a run in one process."""
    (path,) = Path(run).glob("snapshots/step-*/model.safetensors")
    return load_file(path)


def snapshot_tensors(snapshot: Path, kind: str = "model") -> dict[str, Tensor]:
    """The tensors of a snapshot, whichever number of ranks wrote it; kind: model, optimizer or buffers."""
    files = sorted(snapshot.glob(f"{kind}*.safetensors"))
    assert files, f"{snapshot} has no file of the kind {kind}"
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
