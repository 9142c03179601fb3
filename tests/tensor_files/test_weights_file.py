"""Which files of weights can be read, which are refused, and that no file runs code."""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.tensor_files.weights_file import read_weights

Save = Callable[[dict[str, Tensor], Path], None]


@pytest.mark.parametrize(
    ("suffix", "save"), [(".safetensors", save_file), (".pth", torch.save), (".pt", torch.save)]
)
def test_weights_come_back_as_they_were_saved(tmp_path: Path, suffix: str, save: Save) -> None:
    tensors = nn.Linear(3, 2).state_dict()
    path = tmp_path / f"weights{suffix}"
    save(tensors, path)
    (content,) = read_weights(path).values()
    assert content.keys() == tensors.keys()
    assert all(torch.equal(content[name], tensor) for name, tensor in tensors.items())


def test_an_unknown_file_type_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weights\.npz: unknown file type; give one of \.safetensors, \.pth"
    ):
        read_weights(tmp_path / "weights.npz")


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match=rf"model\.weights=.*{name}: no such file"):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match=f"{name}: cannot be read: is a named pipe"):
        read_weights(tmp_path / name)


@pytest.mark.parametrize(("suffix", "save"), [(".safetensors", save_file), (".pth", torch.save)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_reported_as_damaged(
    tmp_path: Path, suffix: str, save: Save, share: float
) -> None:
    path = tmp_path / f"weights{suffix}"
    save({"weight": torch.randn(100, 10)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(RunError, match=rf"weights{suffix}: damaged") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


class RunsCode:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_no_file_runs_code_even_if_the_environment_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[object, Path], None]
) -> None:
    """TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD flips every torch.load that leaves weights_only to its default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    canary, path = tmp_path / "canary", tmp_path / "weights.pth"
    save({"weight": RunsCode(canary)}, path)
    with pytest.raises(RunError, match=r"gpipe (loads only tensors|does not load)") as caught:
        read_weights(path)
    # torch's own message advises to run the code, in bold letters.
    assert not canary.exists() and "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(1)],
        {"epoch": 3},
        {3: torch.zeros(1)},
        torch.zeros(1),
        {"w": torch.zeros(1, device="meta")},
    ],
)
def test_a_file_without_tensors_by_name_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    with pytest.raises(RunError, match=r"contains a \w+ without tensors by name"):
        read_weights(path)


def test_every_state_dict_of_a_checkpoint_is_found_and_other_values_are_left_out(tmp_path: Path) -> None:
    path, tensor = tmp_path / "checkpoint.pth", torch.ones(2)
    checkpoint: dict[str, Any] = {
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
        "state_dict": {"weight": tensor, "best": 0.5},
        "trainer": {"model": {"weight": tensor}, "steps": [1, 2]},
        "optimizer": {"state": {0: {"exp_avg": tensor}}, "param_groups": [{"lr": 0.1}]},
    }
    torch.save(checkpoint, path)
    file = read_weights(path)
    assert file.keys() == {"state_dict", "trainer.model"}
    assert all(own.keys() == {"weight"} for own in file.values())


def test_the_class_that_prevents_loading_is_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pth")
    with pytest.raises(
        RunError, match=r"contains torch.nn.modules.linear.Linear, and gpipe loads only tensors"
    ):
        read_weights(tmp_path / "model.pth")


def test_sizes_that_the_file_does_not_have_take_no_memory(tmp_path: Path) -> None:
    """The pickle of a file claims how large each tensor is; this one claims 16 terabytes."""
    path, other = tmp_path / "weights.pth", tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(4, 4)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            # K\x04K\x04\x86 is the pickled shape (4, 4); \x8a\x06 begins a number of six bytes.
            huge = b"\x8a\x06" + (2**40).to_bytes(6, "little") + b"K\x04\x86"
            claimed = content.replace(b"K\x04K\x04\x86", huge, 1)
            new.writestr(entry.filename, claimed)
    with pytest.raises(RunError, match=r"other\.pth: damaged"):
        read_weights(other)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "weights.pth", tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(RunError, match=r"other\.pth: damaged: it is compressed"):
        read_weights(other)


@pytest.mark.parametrize("name", ["run", "weights.pth"])
def test_a_directory_is_refused_with_the_command_that_makes_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(
        ConfigError, match=r"is a directory; give a file, which gpipe export run=<directory> makes"
    ):
        read_weights(tmp_path / name)
