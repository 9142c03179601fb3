"""The weights in a directory of Hugging Face: one safetensors file, or several with an index.

Reading a file's header proves that the file is whole, so damage is found before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from gpipe_cli.errors import RunError
from gpipe_cli.huggingface import read_json
from gpipe_cli.models.hf.deferred import StoredTensor
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors in the directory by their names in the files; nothing but headers is read yet."""
    name = f"model.path={directory}"
    if (directory / SINGLE).exists():
        return _tensors_in(directory / SINGLE)
    if not (directory / INDEX).exists():
        pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
        if pickled:
            raise RunError(
                f"{name}: has pickled weights only ({pickled[0]}), which can run code and which gpipe does not load; "
                "load and save them with transformers (save_pretrained) in an environment you trust"
            )
        raise RunError(
            f"{name}: has no weights ({SINGLE} or {INDEX}); add them, or give model.init=random to train from scratch"
        )
    tensors: dict[str, StoredTensor] = {}
    for file, expected in _files(directory).items():
        path = directory / file
        if not path.exists():
            raise RunError(f"{name}: {INDEX} names {file}, which is missing")
        of_file = _tensors_in(path)
        if missing := [key for key in expected if key not in of_file]:
            raise RunError(f"{path}: has no tensor {missing[0]}, which {INDEX} says is in it")
        tensors.update(of_file)
    return tensors


def _files(directory: Path) -> dict[str, list[str]]:
    """The files that the index names, each with the tensors that should be in it."""
    path = directory / INDEX
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise RunError(f"{path}: damaged: it has no weight_map")
    files: dict[str, list[str]] = {}
    for key, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise RunError(f"{path}: puts {key} in {file!r}, which is no safetensors file in this directory")
        files.setdefault(file, []).append(key)
    return files


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    try:
        file = TensorFile(path)
    except (BadTensors, OSError) as error:
        raise RunError(f"{path}: damaged, or not a safetensors file: {error}") from error
    return {
        key: StoredTensor(key, outline, _reader(file, path, key), path)
        for key, outline in file.outlines.items()
    }


def _reader(file: TensorFile, path: Path, key: str) -> Callable[[], Tensor]:
    return partial(_read, file, path, key)


def _read(file: TensorFile, path: Path, key: str) -> Tensor:
    try:
        return file.read(key)
    except (BadTensors, OSError) as error:
        raise RunError(f"{path}: changed or damaged since training began: {error}") from error
