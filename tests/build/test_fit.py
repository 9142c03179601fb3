"""What does not fit together is refused in a line before the first step, and what fits trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Gpipe, UserModule

OWN = """
import torch
from torch import nn

from gpipe_cli.data.datasets import Data


class Samples:
    def __init__(self, kind, length):
        self.kind, self.length = kind, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        number = torch.tensor([index / 10])
        targets = {
            "numbers": number, "flat": number[0], "classes": index % 3, "mask": torch.zeros(4, 4, dtype=torch.long),
            "soft": torch.tensor([0.25, 0.75]), "hard": torch.tensor([1.0, 1.0]),
        }
        return torch.full((4,), float(index)), targets[self.kind]


def data(kind: str, classes: int = 3, samples: int = 8, test: bool = True) -> Data:
    return Data(Samples(kind, samples), Samples(kind, 4) if test else None, classes=classes, shape=(4,))


def model(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, outputs))
"""
OWN_MODEL = "model._target_=own_for_tests.model"
WORDS = ("allow=[own_for_tests]", "batch_size=4", "epochs=1", "chunks=2")


@pytest.fixture
def own(gpipe: Gpipe, user_module: UserModule) -> Gpipe:
    user_module("own_for_tests", OWN)
    return lambda kind, *more: gpipe(
        "train", "data._target_=own_for_tests.data", f"data.kind={kind}", *WORDS, *more
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["numbers", "model=mlp", "data.classes=1"],
            3,
            "loss=cross_entropy: takes classes, or probabilities that add up to 1, and the targets are numbers such as "
            "0; choose loss=mse to predict numbers",
        ),
        (["flat", "model=mlp"], 3, "the targets are numbers such as 0; choose loss=mse"),
        (["hard", "model=mlp", "data.classes=2"], 3, "the targets are numbers such as 1; choose loss=mse"),
        (
            ["classes", "model=mlp", "data.classes=1"],
            3,
            "loss=cross_entropy: the data has one class, so there is",
        ),
        (
            ["mask", "model=mlp"],
            3,
            "got an output of shape [2, 3] and targets of shape [2, 4, 4]; choose another",
        ),
        (["classes", "model=mlp", "loss=mse"], 3, "loss=mse: expects numbers and targets of the same shape"),
        (
            ["flat", "model=mlp", "loss._target_=torch.nn.MSELoss", "data.classes=1"],
            3,
            "loss._target_=torch.nn.MSELoss: expects numbers and targets of the same shape",
        ),
        (
            ["classes", "model=mlp", "model.num_classes=2"],
            3,
            "model.num_classes=2: labels are out of range, because the data has 3 classes; remove it",
        ),
        (
            ["classes", OWN_MODEL, "model.outputs=2"],
            3,
            "model: has scores for 2 classes, and the data has 3; give the model at least as many",
        ),
        (["classes", "model=resnet18"], 2, "model: layer 'stem' (Sequential) does not take 2x4: Expected 3D"),
        (
            ["classes", "model=gpt", "loss=token_cross_entropy"],
            2,
            "layer 'embedding' (Embedding) takes tokens, and the data has numbers, which model=mlp takes",
        ),
    ],
)
def test_data_that_does_not_fit_model_or_loss_is_refused(
    own: Gpipe, words: list[str], code: int, message: str
) -> None:
    answer = own(*words)
    assert answer.code == code and answer.err.count("\n") == 1
    assert message in answer.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("model", ["model=mlp", OWN_MODEL])
def test_tokens_are_refused_by_a_model_of_numbers(gpipe: Gpipe, own: Gpipe, model: str) -> None:
    """The first step of model=mlp data=text ended in torch's words about dtypes."""
    answer = gpipe("train", model, "data=text", "data.context=4", "loss=token_cross_entropy", *WORDS)
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert "takes numbers, and the data has tokens, which model=gpt takes" in answer.err


def test_probabilities_train_with_cross_entropy_and_numbers_with_mse(own: Gpipe) -> None:
    small = ("model=mlp", "model.width=4", "model.depth=1")
    assert own("soft", *small, "data.classes=2").code == 0
    assert own("numbers", *small, "data.classes=1", "loss=mse").code == 0


def test_a_run_without_a_test_set_evaluates_on_the_samples_it_held_out(own: Gpipe, gpipe: Gpipe) -> None:
    words = ("model=mlp", "model.width=4", "loss=mse", "data.classes=1", "data.samples=47", "data.test=false")
    words = (*words, "data.validation=0.2", "data.drop_last=true", "seed=7", "run_dir=run")
    trained = own("numbers", *words, "snapshot.monitor=null", "--json").json
    assert trained["steps"] == 9, "38 samples make 9 mini-batches, and the rest is left out"
    allow = "allow=[own_for_tests]"
    for split in ("test", "validation"):
        evaluated = gpipe("eval", "run=run", f"split={split}", allow, "--json").json
        assert (evaluated["samples"], evaluated["loss"]) == (9, trained["loss"])
    # An evaluation leaves nothing out, even with mini-batches that no 38 samples fill.
    assert gpipe("eval", "run=run", "batch_size=99", allow, "--json").json["samples"] == 9
    resumed = gpipe("train", "resume=run", "epochs=3", "data.validation=0.3", allow)
    assert resumed.code == 2 and "data.validation=0.3: the run was started with 0.2" in resumed.err


def test_a_run_without_validation_has_no_such_split(own: Gpipe, gpipe: Gpipe) -> None:
    assert own("soft", "model=mlp", "model.width=4", "data.classes=2", "run_dir=run").code == 0
    refused = gpipe("eval", "run=run", "split=validation", "allow=[own_for_tests]")
    assert refused.code == 2 and "split=validation: data.validation holds out no samples" in refused.err
