"""Load trained weights into a model, from a snapshot or a file, at once or slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from gpipe_cli.engines.protocol import Engine
from gpipe_cli.engines.state import EngineState, load_module, module_state
from gpipe_cli.errors import RunError
from gpipe_cli.models.weights import check_weights, load_weights, read_weights
from gpipe_cli.sequential.without_storage import placeholder
from gpipe_cli.training.snapshot.contents import decode_tensors, open_large_snapshot
from gpipe_cli.training.snapshot.header import BadTensors
from gpipe_cli.training.snapshot.manifest import BUFFERS, MODEL, VerifiedSnapshot
from gpipe_cli.training.snapshot.tensors import TensorFile


def load_into_model(model: nn.Module, weights: str | None, snapshot: VerifiedSnapshot | None) -> None:
    """Load the snapshot if there is one, else the file of weights."""
    if snapshot is None:
        assert weights is not None, "the configuration was checked"
        load_weights(model, read_weights(weights, "weights"), weights, "weights")
        return
    state = EngineState(decode_tensors(snapshot, MODEL), decode_tensors(snapshot, BUFFERS))
    with _errors_name(snapshot.path / MODEL):
        load_module(model, state)


def load_slice_by_slice(
    engine: Engine, model: nn.Module, weights: str | None, snapshot: VerifiedSnapshot | None
) -> None:
    """Load a model that may be larger than memory: never more than one slice of it is in memory."""
    if snapshot is None:
        assert weights is not None, "the configuration was checked"
        engine.load_state(_lazy_state(weights, model))
        return
    with _errors_name(snapshot.path / MODEL):
        engine.load_state(open_large_snapshot(snapshot).state)


def _lazy_state(weights: str, model: nn.Module) -> EngineState:
    """The state in a file of weights, read on demand; buffers outside the state_dict keep their values."""
    expected, buffers = model.state_dict(), module_state(model).buffers
    if Path(weights).suffix != ".safetensors" or not Path(weights).is_file():
        tensors = read_weights(weights, "weights")
        check_weights(model, tensors, weights, "weights")
        return EngineState(
            {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}, buffers
        )
    try:
        file = TensorFile(Path(weights))
    except (BadTensors, OSError) as error:
        raise RunError(f"weights={weights}: damaged, or not a safetensors file ({error})") from error
    check_weights(model, file.outlines, weights, "weights")
    # An expanded zero has the shape and dtype of the model's parameter but no storage. It stands for the tensor in
    # the file, which may have another dtype, until the engine fetches the slice that contains it.
    placeholders = {
        name: placeholder(outline.shape, expected[name].dtype) for name, outline in file.outlines.items()
    }
    outlines = {id(placeholder): file.outlines[name] for name, placeholder in placeholders.items()}

    def fetch(tensor: Tensor) -> Tensor:
        stored = file.fetch(outlines[id(tensor)]) if id(tensor) in outlines else None
        return tensor if stored is None else stored.to(tensor.dtype)

    return EngineState(placeholders, buffers, fetch=fetch)


@contextmanager
def _errors_name(source: Path) -> Iterator[None]:
    try:
        yield
    except RunError as error:
        raise RunError(f"{source}: {error}") from error
