"""The layers of a rank, built alone, have every tensor of the whole model to the bit: here without starting ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.models import huggingface, timm_families, torchvision_models
from benchmarks.models.subject import Subject
from gpipe_cli.build.model import build_deferred
from gpipe_cli.build.parts import RunParts, build_parts
from gpipe_cli.config.compose import compose
from gpipe_cli.config.words import Request
from gpipe_cli.models import amoebanetd, gpt
from gpipe_cli.sequential.deferred import fill_others, load_parameters
from gpipe_cli.torch_internals import deferred_values
from gpipe_cli.torch_internals.deferred_values import DeferredValues, tensors_in_attributes
from tests.support.command_line import Gpipe, UserModule

SMALL = 256
"""Elements, so that most tensors of small models count as large."""
FEW = [
    huggingface.subject("gpt2", "causal_lm"),
    huggingface.subject(
        "mamba", "causal_lm"
    ),  # its initialization asks whether weights are on the meta device
    huggingface.subject("swinv2", "image_classification"),
]
ALL = [*huggingface.subjects(), *timm_families.subjects(), *torchvision_models.subjects()]
RANKS = 3
OWN = """
import torch
from torch import nn
from gpipe_cli.sequential import to_sequential

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3)
        self.norm = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64 * 36, 64)
        self.back = nn.Linear(64, 64 * 36)
        self.back.weight = nn.Parameter(self.fc.weight.detach().t().contiguous())
        self.again = nn.Linear(64 * 36, 64)
        self.again.weight = self.fc.weight
        self.head = nn.Linear(64, num_classes)
        self.register_buffer("noise", torch.rand(64, 64), persistent=False)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, input):
        output = self.fc(self.norm(self.stem(input)).relu().flatten(1))
        return self.head(self.again(self.back(output).relu()) @ self.noise)


def sequence(num_classes):
    return to_sequential(Net(num_classes), torch.empty(2, 3, 8, 8, device="meta"))


def numpy_net(num_classes):
    model = Net(num_classes)
    model.fc.weight.detach().numpy()[:] = 3
    return model
"""


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_values, "SMALL", SMALL)


@pytest.fixture
def own(user_module: UserModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    user_module("own_net", OWN)
    monkeypatch.chdir(tmp_path)
    return "own_net.Net"


def parts_of(words: list[str], *, deferred: bool) -> RunParts:
    request = Request("train", tuple(words))
    settings = compose(request).settings
    return build_parts(settings, words, deferred=deferred, print_notes=False)


def assert_same_tensors(mine: nn.Module, theirs: nn.Module) -> None:
    left, right = tensors_in_attributes(mine.modules()), tensors_in_attributes(theirs.modules())
    assert len(left) == len(right)
    for tensor, expected in zip(left, right, strict=True):
        assert not tensor.is_meta and tensor.stride() == expected.stride()
        assert torch.equal(tensor.nan_to_num(), expected.nan_to_num()), tensor.shape


def assert_ranks_have_their_part(words: list[str]) -> nn.Sequential:
    """Fill the layers of one rank after the other: those of later ranks must not get memory before their turn."""
    expected, parts = parts_of(words, deferred=False).model, parts_of(words, deferred=True)
    layers, values = list(parts.model), parts.values
    assert values is not None and list(parts.model.state_dict()) == list(expected.state_dict())
    for rank in range(RANKS):
        begin, end = (len(layers) * number // RANKS for number in (rank, rank + 1))
        fill_others(layers[begin:end], values)
        load_parameters(layers[begin:end], torch.device("cpu"))
        for mine, theirs in zip(layers[begin:end], list(expected)[begin:end], strict=True):
            assert_same_tensors(mine, theirs)
        filled = {id(tensor) for layer in layers[:end] for tensor in tensors_in_attributes(layer.modules())}
        others = [
            tensor for tensor in tensors_in_attributes(parts.model.modules()) if id(tensor) not in filled
        ]
        assert all(tensor.is_meta or tensor.numel() <= SMALL for tensor in others)
        assert rank or any(tensor.is_meta for tensor in others)
    return parts.model


@pytest.mark.parametrize("target", ["own_net.Net", "own_net.sequence"], ids=["traced", "traces itself"])
def test_the_layers_of_each_rank_of_a_traced_model_are_those_of_the_whole_model(
    own: str, target: str
) -> None:
    """torchvision's models are traced where they are built; tensors of the trace counted as those of the model."""
    words = [f"model._target_={target}", "allow=[own_net]", "data=synthetic", "data.shape=[3,8,8]", "seed=5"]
    names = dict(assert_ranks_have_their_part(words).named_parameters(remove_duplicate=False))
    assert names["fc.weight"] is names["again.weight"], "tied parameters stay tied"


def test_weights_from_a_file_are_those_of_the_whole_model(own: str, tmp_path: Path) -> None:
    words = [f"model._target_={own}", "allow=[own_net]", "data=synthetic", "data.shape=[3,8,8]"]
    state = parts_of([*words, "seed=7"], deferred=False).model.state_dict()
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "w.pth")
    assert_ranks_have_their_part([*words, "model.weights=w.pth", "freeze=[stem]"])


def test_a_model_that_cannot_be_divided_is_built_whole_with_a_line_that_says_why(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=own_net.numpy_net", "allow=[own_net]", "data=synthetic", "data.shape=[3,8,8]"]
    parts = parts_of(words, deferred=True)
    assert parts.values is None
    assert_same_tensors(parts.model, parts_of(words, deferred=False).model)
    message = (
        "building the whole model in memory, because it cannot be divided: numpy needs the memory of a large"
    )
    assert message in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_ranks_train_a_traced_model_to_the_bits_of_one_process(
    own: str, gpipe: Gpipe, tmp_path: Path
) -> None:
    """The large tensors of its layers are above the bound of a real run, and two layers of different ranks are tied."""
    words = (
        f"model._target_={own}",
        "allow=[own_net]",
        "data=synthetic",
        "data.shape=[3,8,8]",
        "data.length=8",
    )
    for engine, more in {"single": (), "processes": ("partitions=2", "balance=params")}.items():
        run = (
            "steps=1",
            "batch_size=8",
            "chunks=2",
            "threads=1",
            f"engine={engine}",
            f"run_dir={engine}",
            *more,
        )
        trained = gpipe("train", *words, *run)
        assert trained.code == 0 and "whole model" not in trained.err, trained.err
        assert gpipe("export", f"run={engine}", f"out={engine}.safetensors").code == 0
    expected, mine = (load_file(tmp_path / f"{engine}.safetensors") for engine in ("single", "processes"))
    assert expected.keys() == mine.keys() and max(tensor.numel() for tensor in mine.values()) > 2**16
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "model",
    [path.stem for path in sorted((Path(__file__).resolve().parents[2] / "conf" / "model").glob("*.yaml"))],
)
def test_the_layers_of_each_rank_of_every_model_are_those_of_the_whole_model(model: str) -> None:
    if model == "hf":
        pytest.skip("needs a directory with a model; `test_a_model_of_others` has them")
    more = ["data=synthetic", "data.shape=[3,32,32]"] if model in ("timm", "torchvision") else []
    assert_ranks_have_their_part([f"model={model}", *more])


@pytest.mark.parametrize("subject", FEW, ids=lambda subject: subject.title)
def test_a_model_of_others_gets_the_tensors_that_its_constructor_draws(subject: Subject) -> None:
    torch.manual_seed(2)
    expected = subject.build(0.0)
    torch.manual_seed(2)

    def make(values: DeferredValues | None) -> nn.Sequential:
        assert values is not None, "it can be divided"
        with values.recording():
            return nn.Sequential(subject.build(0.0))

    model, values = build_deferred(make)
    assert values is not None
    tensors = tensors_in_attributes(model.modules())
    assert any(tensor.is_meta for tensor in tensors)
    fill_others([model], values)
    load_parameters([model], torch.device("cpu"))
    assert_same_tensors(model[0], expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("subject", ALL, ids=lambda subject: f"{subject.name}-{subject.task}")
def test_every_model_of_others_gets_the_tensors_that_its_constructor_draws(subject: Subject) -> None:
    test_a_model_of_others_gets_the_tensors_that_its_constructor_draws(subject)


def test_own_models_with_shared_layers_and_tied_parameters_can_be_divided() -> None:
    for build in (lambda: gpt.build(16, 3, 2, num_classes=64, input_shape=(9,)), amoebanetd.build):
        values = DeferredValues()
        torch.manual_seed(1)
        expected = build()
        torch.manual_seed(1)
        with values.recording():
            model = build()
        values.fill(tensors_in_attributes(model.modules()))
        assert_same_tensors(model, expected)
