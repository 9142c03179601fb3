"""Trained weights into a model: of a snapshot or a file, all at once or never more than a slice of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState, load_module, module_state
from gpipe_cli.errors import RunError
from gpipe_cli.models.weights import check_weights, load_weights, read_weights
from gpipe_cli.run.chosen import Chosen
from gpipe_cli.training.snapshot.contents import open_large_snapshot, tensors_of
from gpipe_cli.training.snapshot.manifest import BUFFERS, MODEL
from gpipe_cli.training.snapshot.tensors import BadTensors, TensorFile

__all__ = ["fill", "fill_slice_by_slice"]


def fill(model: nn.Module, weights: str | None, chosen: Chosen | None) -> None:
    """From the snapshot, where one is chosen, else from the file."""
    if chosen is None:
        assert weights is not None, "the configuration was checked"
        load_weights(model, read_weights(weights, "weights"), weights, "weights")
        return
    state = EngineState(tensors_of(chosen.snapshot, MODEL), tensors_of(chosen.snapshot, BUFFERS))
    with _named(str(chosen.snapshot.path / MODEL)):
        load_module(model, state)


def fill_slice_by_slice(engine: Engine, model: nn.Module, weights: str | None, chosen: Chosen | None) -> None:
    """The same for a model that may be larger than memory."""
    if chosen is not None:
        state = open_large_snapshot(chosen.snapshot).state
        with _named(str(chosen.snapshot.path / MODEL)):
            engine.load_state(state)
        return
    assert weights is not None, "the configuration was checked"
    engine.load_state(_state_of(weights, model))


def _state_of(weights: str, model: nn.Module) -> EngineState:
    """A file has no buffers but those of a state_dict; the others stay as they are."""
    expected, buffers = model.state_dict(), module_state(model).buffers
    if Path(weights).suffix != ".safetensors" or not Path(weights).is_file():
        tensors = read_weights(weights, "weights")
        check_weights(model, tensors, weights, "weights")
        return EngineState({name: one.to(expected[name].dtype) for name, one in tensors.items()}, buffers)
    try:
        file = TensorFile(Path(weights))
    except (BadTensors, OSError) as error:
        raise RunError(f"weights={weights}: damaged, or not a safetensors file ({error})") from error
    check_weights(model, file.outlines, weights, "weights")
    # The file may have another precision, in which its tensors are looked up.
    outlines = {
        name: torch.zeros((), dtype=expected[name].dtype).expand(one.shape)
        for name, one in file.outlines.items()
    }
    sources = {id(one): file.outlines[name] for name, one in outlines.items()}

    def fetch(tensor: Tensor) -> Tensor:
        found = file.fetch(sources[id(tensor)]) if id(tensor) in sources else None
        return tensor if found is None else found.to(tensor.dtype)

    return EngineState(outlines, buffers, fetch=fetch)


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Whatever does not fit is told with where it is from."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{source}: {error}") from error
