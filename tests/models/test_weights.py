"""Which files of weights load, which are refused, and that no file runs code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.models.weights import load_weights, read_weights

Save = Callable[[dict[str, Tensor], Path], None]


@pytest.mark.parametrize(
    ("suffix", "save"), [(".safetensors", save_file), (".pth", torch.save), (".pt", torch.save)]
)
def test_weights_come_back_as_they_were_saved(tmp_path: Path, suffix: str, save: Save) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    path = tmp_path / f"weights{suffix}"
    save(model.state_dict(), path)
    load_weights(other, read_weights(path), path)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


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


def test_another_precision_is_converted_but_integers_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    given = {name: tensor.half() for name, tensor in model.state_dict().items()}
    load_weights(model, given, "file")
    given["weight"] = given["weight"].int()
    with pytest.raises(ConfigError, match="1 with another dtype: weight int32 instead of float32"):
        load_weights(model, given, "file")


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
    with pytest.raises(RunError, match=r"damaged, or contains more than tensors, which gpipe does not load$"):
        read_weights(path)
    assert not canary.exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"epoch": 3}, {3: torch.zeros(1)}, torch.zeros(1)])
def test_a_file_without_tensors_by_name_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    with pytest.raises(RunError, match=r"contains a \w+ instead of a dict of tensors by name"):
        read_weights(path)


def test_weights_of_another_model_are_listed_and_counted() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    tensors = model.state_dict()
    with pytest.raises(
        ConfigError, match=r"w\.pth: made for another model \(8 missing: 0\.weight.*, \.\.\.\)"
    ):
        load_weights(model, {}, "w.pth")
    with pytest.raises(ConfigError, match=r"\(1 missing: 3\.bias; 1 unexpected: other\)"):
        incomplete = {name: tensor for name, tensor in tensors.items() if name != "3.bias"}
        load_weights(model, incomplete | {"other": torch.zeros(1)}, "w.pth")
    with pytest.raises(ConfigError, match=r"\(1 with another shape: 0\.weight 5x2 instead of 2x2\)"):
        load_weights(model, tensors | {"0.weight": torch.zeros(5, 2)}, "w.pth")
