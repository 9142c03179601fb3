"""The weights that a model starts from: `model.weights=FILE`, and `model.new_head=true` for other classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.weights import LoadedWeights, load_weights
from gpipe_cli.sequential.without_storage import UnloadedParameter, without_storage
from gpipe_cli.tensor_files.weights_file import read_weights

FILE, NEW_HEAD = "weights", "new_head"
WEIGHTS_KEYS = (FILE, NEW_HEAD)
"""Keys of `model` that gpipe uses itself, for every model that does not read its weights in its own way."""


def check_weights_keys(keys: Mapping[str, Any]) -> None:
    """Check `model.weights` and `model.new_head` before the model is built."""
    file, new_head = keys.get(FILE), keys.get(NEW_HEAD, False)
    if not isinstance(file, str | None):
        raise ConfigError(f"model.{FILE}={file}: expected the path of a file")
    if not isinstance(new_head, bool):
        raise ConfigError(f"model.{NEW_HEAD}={new_head}: expected true or false")
    if new_head and file is None:
        raise ConfigError(
            f"model.{NEW_HEAD}=true: replaces the head of a file, and model.{FILE} is not given"
        )


def load_initial_weights(
    model: nn.Sequential, keys: Mapping[str, Any], build: Callable[[int], nn.Module] | None, classes: int
) -> LoadedWeights | None:
    """Load the file that the keys name, if any.

    build: makes the same model for another number of classes; None if it cannot.
    """
    path = keys.get(FILE)
    if path is None:
        return None
    if any(isinstance(parameter, UnloadedParameter) for parameter in model.parameters()):
        raise ConfigError(
            f"model.{FILE}={path}: this model reads its weights from the files in model.path; leave model.{FILE} out, "
            "or start from it alone with model.init=random"
        )
    head = partial(head_tensors, model, build, classes)
    return load_weights(model, read_weights(path), path, head=head, new_head=keys.get(NEW_HEAD, False))


def head_tensors(model: nn.Module, build: Callable[[int], nn.Module] | None, classes: int) -> Collection[str]:
    """The names of the tensors that score classes: those that differ in a model for one class more.

    Where no other model can be built, those of the last module with an output for each class.
    """
    expected = model.state_dict()
    other = {} if build is None else _outline(build, classes + 1)
    head = {name for name, tensor in expected.items() if name in other and other[name].shape != tensor.shape}
    if head:
        return head
    scoring = [name for name, tensor in expected.items() if tensor.shape[:1] == (classes,)]
    last = scoring[-1].rpartition(".")[0] if scoring else None
    return {name for name in expected if name.rpartition(".")[0] == last}


def _outline(build: Callable[[int], nn.Module], classes: int) -> Mapping[str, torch.Tensor]:
    """The tensors of a model for so many classes, without their values."""
    try:
        # Small tensors are drawn even there, which must not change what else is drawn from the seed.
        with torch.random.fork_rng(devices=[]), without_storage():
            return build(classes).state_dict()
    except (ConfigError, RuntimeError, ValueError, TypeError):  # the model accepts no other number of classes
        return {}
