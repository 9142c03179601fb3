"""Every classification model of torchvision becomes a sequence: names and cuts for all, bits for each family.

The bits of all the others are compared under `-m slow`; one model at a time, because the largest need 9 GB.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.models import torchvision_zoo
from gpipe_cli.models.torchvision_zoo import build
from gpipe_cli.sequential import to_sequential
from gpipe_cli.vision import torchvision

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"
FILES = [path for path in sorted(CONF.glob("*.yaml")) if "torchvision_zoo" in path.read_text()]
NAMES = torchvision_zoo.names()
SMALLEST = """
    alexnet convnext_tiny densenet121 efficientnet_b0 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small
    regnet_y_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t vgg11 vit_b_32
""".split()  # noqa: SIM905 - a list of words reads better as words
"""Of each family that takes images of 64x64; inception_v3 and maxvit_t do not."""
NUMERIC = [name if name in SMALLEST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
SIDES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}  # the others do with 64


class WithoutStorage(TorchFunctionMode):
    """Parameters are made on the meta device; a regnet computes its widths, so the rest stays real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = {"device": "meta"} if func in (torch.empty, torch.zeros, torch.ones) else {}
        return func(*args, **{**(kwargs or {}), **made})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small an input gains nothing from two, and loses much where other work wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    gc.collect()


def original_of(name: str, side: int) -> nn.Module:
    options: dict[str, Any] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    if name.startswith("vit_"):
        options = {"image_size": side}
    model = torchvision.models.get_model(name, weights=None, num_classes=5, **options)
    assert isinstance(model, nn.Module)
    return model


def without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def outputs_of(model: nn.Module, input: Tensor) -> tuple[Tensor, ...]:
    output = model(input)
    return tuple(output) if isinstance(output, tuple) else (output,)


def backward(model: nn.Module, input: Tensor) -> tuple[Tensor, ...]:
    model.zero_grad()
    outputs = outputs_of(model, input)
    torch.autograd.backward([output.square().sum() for output in outputs])
    return tuple(output.detach() for output in outputs)


def assert_same_gradients(original: nn.Module, other: nn.Module) -> None:
    for (name, there), here in zip(original.named_parameters(), other.parameters(), strict=True):
        assert (there.grad is None) == (here.grad is None), name
        assert there.grad is None or here.grad is None or torch.equal(there.grad, here.grad), name


def test_there_are_eighty_of_them_at_least() -> None:
    assert len(NAMES) >= 80 and set(SMALLEST) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_cut_and_keeps_its_names(name: str) -> None:
    side = 299 if name == "inception_v3" else 224
    with WithoutStorage():
        model = original_of(name, side)
    sequence = to_sequential(model, torch.empty(2, 3, side, side, device="meta"))
    assert len(sequence) > 8, f"{len(sequence) - 1} cuts"
    assert list(sequence.state_dict()) == list(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in sequence.named_parameters()] == names
    assert len(set(sequence.layer_names)) == len(sequence)
    for other, of in ((sequence, model), (model, sequence)):
        other.load_state_dict(of.state_dict(), assign=True)


@pytest.mark.parametrize("name", NUMERIC)
def test_its_bits_are_the_originals_alone_and_in_a_pipe(name: str) -> None:
    torch.manual_seed(0)
    side = SIDES.get(name, 64)
    original = without_chance(original_of(name, side))
    input = torch.randn(2, 3, side, side)
    sequence = to_sequential(copy.deepcopy(original), input)
    third = len(sequence) // 3
    pipe = GPipe(
        sequence, [third, third, len(sequence) - 2 * third], devices=["cpu"] * 3, checkpoint="always"
    )
    with pipe, torch.no_grad():
        expected = original.eval()(input)
        assert torch.equal(sequence.eval()(input), expected)
        assert torch.equal(pipe.eval()(input), expected)
    state = {key: tensor.clone() for key, tensor in original.state_dict().items()}
    expected_outputs = backward(original.train(), input)
    for model in (sequence, pipe):
        model.load_state_dict(state)
        with pipe:
            outputs = backward(model.train(), input)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected_outputs, strict=True))
        assert_same_gradients(original, sequence)
        for key, tensor in original.state_dict().items():
            assert torch.equal(sequence.state_dict()[key], tensor), key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_facts_of_its_yaml_are_true(path: Path) -> None:
    text = path.read_text()
    (name,) = re.findall(r"^name: (\w+)$", text, flags=re.MULTILINE)
    (side,) = re.findall(r" input=3x(\d+)x\1$", text, flags=re.MULTILINE)
    with WithoutStorage():
        sequence = build(name, input_shape=(3, int(side), int(side)))
    parameters = sum(parameter.numel() for parameter in sequence.parameters())
    facts = f"# facts: parameters={parameters} layers={len(sequence)} input=3x{side}x{side}"
    assert text.splitlines()[1] == facts
    assert name == path.stem or path.stem == "torchvision"
    assert f"/data@_global_.data: {'digits' if side == '32' else 'digits_224'}\n" in text


def test_weights_of_torchvision_load(tmp_path: Path) -> None:
    original = torchvision.models.squeezenet1_1(weights=None, num_classes=7).eval()
    path = tmp_path / "squeezenet.safetensors"
    save_file(original.state_dict(), path)
    input = torch.randn(1, 3, 64, 64)
    sequence = build("squeezenet1_1", 7, weights=path, input_shape=(3, 64, 64)).eval()
    assert torch.equal(sequence(input), original(input))
    with pytest.raises(ConfigError, match=r"made for another model \(\d+ of another shape: classifier\.1"):
        build("squeezenet1_1", 8, weights=path)


def test_a_vision_transformer_is_built_for_the_size_of_the_images() -> None:
    sequence = build("vit_b_32", input_shape=(3, 32, 32)).eval()
    assert sequence.state_dict()["encoder.pos_embedding"].shape == (1, 2, 768)
    assert sequence(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_what_is_named_as_a_leaf_stays_whole() -> None:
    sequence = build("squeezenet1_1", leaves=["features"])
    assert sequence.layer_names[0] == "features"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fasterrcnn_resnet50_fpn", "returns boxes"),
        ("fcn_resnet50", "returns a dict"),
        ("r3d_18", "takes clips"),
        ("raft_small", "takes two images"),
        ("quantized_resnet18", "cannot be trained"),
        ("swin_tt", "torchvision has no such model; choose one of swin_t, "),
    ],
)
def test_other_models_are_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name={name}: .*{re.escape(reason)}"):
        build(name)


def test_images_a_model_cannot_take_are_told_with_the_layer() -> None:
    with pytest.raises(ConfigError, match=r"'Mixed_6a.*' does not take an input of 2x3x32x32: .*Kernel size"):
        build("inception_v3", input_shape=(3, 32, 32))
    with pytest.raises(ConfigError, match=r"model\.num_classes=0: must be a whole number of at least 1"):
        build(num_classes=0)
