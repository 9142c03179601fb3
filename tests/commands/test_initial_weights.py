"""gpipe train model.weights=FILE: for every model, printed and recorded, and not needed again to resume or evaluate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command_line import Gpipe, UserModule
from tests.support.run_files import snapshot_tensors

ALLOW = "allow=[tiny_for_tests]"
HEAD = ("7.weight", "7.bias")


def tensors(run: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    pattern = "step-*" if step is None else f"step-*{step}"
    return snapshot_tensors(max((run / "snapshots").glob(pattern)))


@pytest.fixture
def exported(tiny: Gpipe, gpipe: Gpipe, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of a short run, in w.safetensors."""
    assert tiny("train", "steps=1", "run_dir=first").code == 0
    assert gpipe("export", "run=first", "out=w.safetensors").code == 0
    return load_file(tmp_path / "w.safetensors")


def test_a_run_starts_from_exported_weights_and_no_longer_needs_them(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path, exported: dict[str, torch.Tensor]
) -> None:
    words = ("model.weights=w.safetensors", "seed=1", "optimizer.lr=1e-30", "run_dir=second", "steps=1")
    answer = tiny("train", *words)
    assert answer.code == 0, answer.err
    line = "11 of 11 tensors from w.safetensors"
    assert answer.err.count(f"loaded {line}\n") == 1 and line in answer.out
    assert json.loads((tmp_path / "second" / "launch.json").read_text())["loaded"] == line
    trained = tensors(tmp_path / "second")
    assert all(
        torch.equal(trained[name], tensor)
        for name, tensor in exported.items()
        if name.endswith(("weight", "bias"))
    )
    (tmp_path / "w.safetensors").unlink()
    resumed = gpipe("train", "resume=second", "steps=2", ALLOW)
    assert resumed.code == 0 and "loaded" not in resumed.err, resumed.err
    assert json.loads((tmp_path / "second" / "launch.json").read_text())["loaded"] == line
    assert gpipe("eval", "run=second", ALLOW).code == 0
    shutil.rmtree(tmp_path / "second" / "snapshots")
    again = gpipe("train", "resume=auto", "run_dir=second", ALLOW)
    assert again.code == 4 and f"model.weights={tmp_path / 'w.safetensors'}: no such file" in again.err


@pytest.mark.slow
def test_a_head_for_other_classes_is_new_if_asked_for(
    tiny: Gpipe, tmp_path: Path, exported: dict[str, torch.Tensor]
) -> None:
    words = ("model.weights=w.safetensors", "data.classes=7", "steps=1", "optimizer.lr=1e-30")
    refused = tiny("train", *words)
    assert refused.code == 2 and "7.weight 10x64 instead of 7x64" in refused.err
    assert "give model.new_head=true" in refused.err
    answer = tiny("train", *words, "+model.new_head=true", "run_dir=r")
    assert answer.code == 0, answer.err
    assert "loaded 9 of 11 tensors from w.safetensors; new: 7.weight, 7.bias" in answer.err
    trained = tensors(tmp_path / "r")
    assert torch.equal(trained["0.weight"], exported["0.weight"]) and trained["7.weight"].shape == (7, 64)


@pytest.mark.parametrize(
    "model",
    [
        ("model=mlp", "model.width=8", "data=synthetic"),
        ("model=gpt", "model.width=8", "model.heads=2", "model.depth=1", "data.context=8"),
        ("model=unet", "model.base_channels=2", "model.depth=2", "data.size=16"),
        ("model=torchvision", "model.name=squeezenet1_1", "data=synthetic", "data.shape=[3,32,32]"),
        ("model=timm", "model.name=test_resnet", "data=synthetic", "data.shape=[3,32,32]"),
        ("model=amoebanetd", "model.num_filters=8", "data=synthetic", "data.shape=[3,32,32]"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.slow
def test_every_model_starts_from_a_file_of_its_own_weights(
    gpipe: Gpipe, tmp_path: Path, model: tuple[str, ...]
) -> None:
    rest = ("batch_size=4", "chunks=2", "steps=1", "threads=1")
    first = gpipe("train", *model, *rest, "run_dir=first")
    assert first.code == 0, first.err
    stored = tensors(tmp_path / "first")
    torch.save({"model": {f"module.{name}": tensor for name, tensor in stored.items()}, "epoch": 3}, "w.pth")
    words = ("model.weights=w.pth", "optimizer.lr=1e-30", "run_dir=second")
    answer = gpipe("train", *model, *rest, *words)
    assert answer.code == 0, answer.err
    assert f"loaded {len(stored)} of {len(stored)} tensors from w.pth (model)" in answer.err
    after = tensors(tmp_path / "second")
    parameters = [name for name in stored if name.endswith(("weight", "bias"))]
    # A step with this learning rate changes only zeros.
    assert parameters and all(
        torch.allclose(after[name], stored[name], rtol=0, atol=1e-20) for name in parameters
    )
    new_head = gpipe("train", *model, *rest, "model.weights=w.pth", "model.new_head=true", "--dry-run")
    assert new_head.code == 0 and "; new: " in new_head.err, new_head.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_and_frozen_layers_are_the_same_under_every_engine(
    tiny: Gpipe, tmp_path: Path, exported: dict[str, torch.Tensor]
) -> None:
    given = ("model.weights=w.safetensors", "freeze=[0,1]", "threads=1", "seed=3")
    for run, words in {
        "single": ("engine=single",),
        "threads": ("balance=time",),
        "offload": ("engine=offload", "engine.to=disk"),
        "processes": ("engine=processes",),
    }.items():
        answer = tiny("train", *given, *words, f"run_dir={run}")
        assert answer.code == 0 and "11 of 11 tensors from w.safetensors" in answer.out, (run, answer.err)
        expected, mine = tensors(tmp_path / "single"), tensors(tmp_path / run)
        assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items()), run
        assert torch.equal(mine["0.weight"], exported["0.weight"])


TRACED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4 * 36, num_classes)

    def forward(self, input):
        return self.fc(self.stem(input).relu().flatten(1))
"""


def test_a_traced_model_of_the_user_starts_from_a_file_and_a_dry_run_tells_so(
    tiny: Gpipe, tmp_path: Path, user_module: UserModule
) -> None:
    user_module("traced_for_tests", TRACED)
    stored = {"stem.weight": torch.zeros(4, 3, 3, 3), "stem.bias": torch.ones(4)}
    save_file(stored, tmp_path / "stem.safetensors")
    words = ("model._target_=traced_for_tests.Net", "allow=[traced_for_tests]")
    given = ("+model.weights=stem.safetensors", "+model.new_head=true")
    for more in (("--dry-run",), ("steps=1", "run_dir=r", "freeze=[stem]")):
        answer = tiny("train", *words, *given, *more)
        assert answer.code == 0, answer.err
        assert "loaded 2 of 4 tensors from stem.safetensors; new: fc.weight, fc.bias" in answer.err
    assert all(torch.equal(tensors(tmp_path / "r")[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=mlp", "model.new_head=3"), "model.new_head=3: expected true or false"),
        (("model=mlp", "model.weights=[1]"), "model.weights=[1]: expected text or null"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(gpipe: Gpipe, words: tuple[str, ...], message: str) -> None:
    answer = gpipe("train", *words)
    assert answer.code == 2 and message in answer.err
