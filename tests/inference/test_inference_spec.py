"""What predictions need besides weights: what is saved, and that a hostile or damaged file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from gpipe_cli.build.loader import make_loader
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.errors import RunError
from gpipe_cli.inference.inference_spec import (
    METADATA_KEY,
    SPEC_FILE,
    InferenceSpec,
    spec_of_run,
    spec_of_weights,
    write_spec,
)
from tests.support.command_line import Gpipe

DATA = {"_target_": "gpipe_cli.data.images.build_digits", "size": 8}
MODEL = {"_target_": "gpipe_cli.models.mlp.build", "width": 4, "depth": 1}
LOSS = {"_target_": "gpipe_cli.losses.cross_entropy.CrossEntropy"}


def settings(**changes: Any) -> ModelConfig:
    transform = {"_target_": "gpipe_cli.data.transforms.basic"}
    return ModelConfig(**{"model": MODEL, "data": DATA, "transform": transform, "loss": LOSS, **changes})


def spec_of(**changes: Any) -> InferenceSpec:
    return InferenceSpec.of(settings(**changes), make_loader(settings(**changes)))


def test_a_run_saves_names_statistics_shape_and_components(tmp_path: Path) -> None:
    model = {**MODEL, "weights": "/home/me/start.pth", "new_head": True}
    write_spec(tmp_path, settings(model=model), make_loader(settings()))
    spec = spec_of_run(tmp_path)
    assert spec == spec_of()  # without the file that training began with
    assert spec.class_names == tuple("0123456789") and (spec.task, spec.classes) == ("classification", 10)
    assert spec.shape == (3, 8, 8) and spec.mean == (0.305,) * 3 and spec.std == (0.324,) * 3
    assert spec.model == MODEL and spec.loss == LOSS
    assert spec_of_run(tmp_path / "older") is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"transform": {"_target_": "gpipe_cli.data.transforms.none"}}, {"mean": None, "std": None}),
        (
            {
                "transform": {
                    "_target_": "gpipe_cli.data.transforms.augment",
                    "mean": [0, 0, 0],
                    "std": [1, 1, 2],
                }
            },
            {"mean": (0, 0, 0), "std": (1, 1, 2)},
        ),
        ({"model": {**MODEL, "num_classes": 12}}, {"classes": 12, "class_names": None}),
        ({"loss": {"_target_": "gpipe_cli.losses.mse.MeanSquaredError"}}, {"task": "regression"}),
        (
            {"data": {"_target_": "gpipe_cli.data.generated.build_shapes", "size": 16, "length": 4}},
            {"task": "segmentation", "target_shape": (16, 16), "classes": 4},
        ),
        (
            {"data": {"_target_": "gpipe_cli.data.texts.build_text_files", "context": 8}},
            {"task": "other", "shape": (8,)},
        ),
    ],
)
def test_the_settings_decide_what_is_saved(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    if "text" in str(changes):
        changes["transform"] = {"_target_": "gpipe_cli.data.transforms.none"}
    spec = spec_of(**changes)
    assert {name: getattr(spec, name) for name in expected} == expected
    assert InferenceSpec.from_text(spec.to_text()) == spec


def test_the_data_of_a_spec_stands_for_that_of_training() -> None:
    data = spec_of().data()
    input, target = data.train[0]
    assert isinstance(input, torch.Tensor) and input.shape == (3, 8, 8) and target == 0
    assert data.classes == 10 and data.mean == (0.305,) * 3 and data.class_names == tuple("0123456789")


BAD = [
    ("shape", [3, 10**9, 10**9], "is not a shape"),
    ("shape", [3, -8, 8], "is not a shape"),
    ("shape", [3, True, 8], "is not a shape"),
    ("shape", [1] * 99, "is not a shape"),
    ("shape", "3", "is not a shape"),
    ("target_shape", [2**40], "is not a shape"),
    ("classes", 10**12, "is not a number of classes"),
    ("classes", True, "is not a number of classes"),
    ("class_names", ["a"], "are not the names of 10 classes"),
    ("class_names", [1] * 10, "are not the names of 10 classes"),
    ("mean", [0.1], "does not fit inputs of the shape"),
    ("mean", [float("nan")] * 3, "does not fit inputs of the shape"),
    ("std", [0, 1, 1], "does not fit inputs of the shape"),
    ("task", 5, "is not text"),
    ("model", [], "is not a mapping"),
]


@pytest.mark.parametrize(
    ("key", "value", "message"), BAD, ids=[f"{key}={value!s:.20}" for key, value, _ in BAD]
)
def test_a_value_that_gpipe_does_not_write_is_refused(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    content = {**json.loads(spec_of().to_text()), key: value}
    (tmp_path / SPEC_FILE).write_text(json.dumps(content))
    with pytest.raises(RunError, match=rf"inference.json: damaged: {key}=.*{message}"):
        spec_of_run(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "[" * 10**5, '{"shape": 1e999}'])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SPEC_FILE).write_text(text)
    with pytest.raises(RunError, match=r"inference.json: damaged: "):
        spec_of_run(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", {METADATA_KEY: text})
    with pytest.raises(RunError, match=r"w.safetensors: its metadata cannot be used: "):
        spec_of_weights(str(tmp_path / "w.safetensors"))


def test_a_file_that_gpipe_did_not_export_has_no_spec(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", {"format": "pt"})
    assert spec_of_weights(str(tmp_path / "w.safetensors")) is None and spec_of_weights("net.pth") is None
    (tmp_path / "x.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(RunError, match="damaged, or not a safetensors file"):
        spec_of_weights(str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"_target_": "os.mkdir", "path": "canary"}, "model._target_=os.mkdir: not allowed here"),
        ({**MODEL, "width": "${oc.decode:1}"}, "oc.decode"),
        ({**MODEL, "width": "${"}, "${"),
        ({**MODEL, "width": 10**30}, "a whole number must be between"),
        ({**MODEL, "wdith": 4}, "wdith"),
    ],
)
def test_a_hostile_file_executes_nothing(
    gpipe: Gpipe, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    content = {**json.loads(spec_of().to_text()), "model": model}
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", {METADATA_KEY: json.dumps(content)})
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    answer = gpipe("predict", "weights=w.safetensors", "input=a.png")
    assert answer.code in (2, 4) and message in answer.err and answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("gpipe: error: ") and not (tmp_path / "canary").exists()
