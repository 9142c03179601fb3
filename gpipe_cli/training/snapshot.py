"""Weights on disk: safetensors under the model's original names, one directory per step."""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors
from safetensors.torch import load_file, save_file
from torch import nn

from gpipe_cli.errors import ResourceError, RunError


def save_weights(module: nn.Module, run: Path, step: int) -> Path:
    """`snapshots/step-N/model.safetensors`, complete or not there at all."""
    directory = run / "snapshots" / f"step-{step:08d}"
    path = directory / "model.safetensors"
    temporary = directory.with_suffix(".tmp")
    # The format refuses tensors that share memory; tied ones are written once under each name.
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()
    }
    try:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / path.name, metadata={"step": str(step)})
        temporary.rename(directory)
    except (OSError, safetensors.SafetensorError) as error:
        raise ResourceError(f"{path}: the weights cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill the module from a file of `save_weights`; every name must be there, and no other."""
    try:
        module.load_state_dict(load_file(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"{path}: damaged: {error}") from error
    except RuntimeError as error:
        first = " ".join(str(error).split())
        raise RunError(f"{path}: does not fit the model: {first}") from error


def newest_weights(run: str) -> Path:
    """The weights of the newest snapshot of a run."""
    found = sorted(Path(run).glob("snapshots/step-*/model.safetensors"))
    if not Path(run).is_dir():
        raise RunError(f"run={run}: no such directory")
    if not found:
        raise RunError(
            f"run={run}: is no run directory, or its training saved nothing: there is no snapshot in it"
        )
    return found[-1]
