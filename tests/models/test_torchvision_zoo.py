"""Every model of torchvision for classification, segmentation and video becomes a Sequence.

By default a few small models train a step in a pipe like the original, to the bit, and of a few others only names and
cuts are checked, on the meta device. `-m slow` does both for every model;
`python -m benchmarks.models --family torchvision` does more, one process per model, since the largest need 8 GB.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.models.compare import prove_in_a_pipe
from benchmarks.models.torchvision_models import (
    LEAST_LAYERS,
    SMALLEST_SHAPES,
    TASKS,
    original_of,
    smallest_shape,
    subject,
)
from gpipe_cli.errors import ConfigError
from gpipe_cli.models import torchvision_zoo
from gpipe_cli.models.torchvision_zoo import build
from gpipe_cli.sequential import to_sequential

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
FILES = [path for path in sorted(CONF.glob("*.yaml")) if "torchvision_zoo" in path.read_text()]
NAMES = [name for task in TASKS for name in torchvision_zoo.names(task)]
COMPARED = ["resnet18", "shufflenet_v2_x0_5"]
"""Two small families; the others are left to `-m slow`."""
TRACED = ["vit_b_32"]
"""Of another kind; `prove_in_a_pipe` checks names too, so those of COMPARED are not repeated here."""

QUICK = ("r3d_18", "vgg16")
"""YAML files whose models are traced in a second."""


def slow_unless_in(default: list[str]) -> list[Any]:
    return [name if name in default else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


class WithoutStorage(TorchFunctionMode):
    """Parameters are made on the meta device; a regnet computes its widths, so the rest stays real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = {"device": "meta"} if func in (torch.empty, torch.zeros, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **made})


def test_there_are_eighty_and_fifteen_of_them_at_least() -> None:
    counts = [len(torchvision_zoo.names(task)) for task in TASKS]
    assert all(count >= least for count, least in zip(counts, (80, 6, 9), strict=True))
    assert {*COMPARED, *TRACED} <= set(NAMES)


@pytest.mark.parametrize("name", slow_unless_in(TRACED))
def test_it_is_cut_and_keeps_its_names(name: str) -> None:
    is_usual = name in torchvision_zoo.names() and name not in SMALLEST_SHAPES
    shape = (3, 224, 224) if is_usual else smallest_shape(name)
    with WithoutStorage():
        model = original_of(name, shape)
    sequence = to_sequential(model, torch.empty(2, *shape, device="meta"))
    assert len(sequence) >= LEAST_LAYERS
    assert list(sequence.state_dict()) == list(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in sequence.named_parameters()] == names
    assert len(set(sequence.layer_names)) == len(sequence)
    for other, of in ((sequence, model), (model, sequence)):
        other.load_state_dict(of.state_dict(), assign=True)


@pytest.mark.parametrize("name", slow_unless_in(COMPARED))
def test_a_step_in_a_pipe_has_the_bits_of_the_original(name: str) -> None:
    if name not in COMPARED:
        gc.collect()  # the large ones need the memory of the one before
    model = subject(name)
    (batches,) = model.batches()
    prove_in_a_pipe(model, batches)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
        for path in FILES
    ],
)
def test_the_facts_of_its_yaml_are_true(path: Path) -> None:
    text = path.read_text()
    (name,) = re.findall(r"^name: (\w+)$", text, flags=re.MULTILINE)
    (data,) = re.findall(r"/data@_global_.data: (\w+)$", text, flags=re.MULTILINE)
    of_data = (CONF.parent / "data" / f"{data}.yaml").read_text()
    (classes, input) = re.findall(r"classes=(\d+) .* input=([\dx]+)$", of_data, flags=re.MULTILINE)[0]
    with WithoutStorage():
        sequence = build(name, int(classes), input_shape=tuple(map(int, input.split("x"))))
    parameters = sum(parameter.numel() for parameter in sequence.parameters())
    assert text.splitlines()[1] == f"# facts: parameters={parameters} layers={len(sequence)} input={input}"
    assert name == path.stem or path.stem == "torchvision"


def test_a_vision_transformer_is_built_for_the_size_of_the_images() -> None:
    with WithoutStorage():
        sequence = build("vit_b_32", input_shape=(3, 32, 32)).eval()
    assert sequence.state_dict()["encoder.pos_embedding"].shape == (1, 2, 768)
    assert sequence(torch.empty(1, 3, 32, 32, device="meta")).shape == (1, 10)


def test_what_is_named_as_a_leaf_stays_whole() -> None:
    sequence = build("squeezenet1_1", leaves=["features"])
    assert sequence.layer_names[0] == "features"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fasterrcnn_resnet50_fpn", "returns a different number of boxes"),
        ("ssdlite320_mobilenet_v3_large", "returns a different number of boxes"),
        ("raft_small", "takes two images"),
        ("quantized_resnet18", "cannot be trained"),
        ("swin_tt", "torchvision has no such model; choose one of swin_t, "),
    ],
)
def test_other_models_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name={name}: .*{re.escape(reason)}"):
        build(name)


def test_images_that_a_model_does_not_accept_are_reported_with_the_layer() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'Mixed_6a.*' does not accept an input of shape 2x3x32x32 in training: .*Kernel size",
    ):
        build("inception_v3", input_shape=(3, 32, 32))
    with pytest.raises(ConfigError, match=r"r3d_18: takes clips: .*has 3x8x8; .* data=synthetic_clips$"):
        build("r3d_18", input_shape=(3, 8, 8))
    with pytest.raises(
        ConfigError, match=r"fcn_resnet50: takes images: .*has 3x8x8x8; choose data that fits"
    ):
        build("fcn_resnet50", input_shape=(3, 8, 8, 8))
    with pytest.raises(ConfigError, match=r"mvit_v2_s: takes only clips of 3x16x224x224"):
        build("mvit_v2_s", input_shape=(3, 8, 64, 64))
    with pytest.raises(ConfigError, match=r"model\.num_classes=0: must be a whole number of at least 1"):
        build(num_classes=0)
