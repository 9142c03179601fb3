"""A loss is a mean over samples, so that it does not depend on how a mini-batch is divided."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.losses.cross_entropy import CrossEntropy
from gpipe_cli.losses.dice import Dice
from gpipe_cli.losses.measures import measure_of
from gpipe_cli.losses.mse import MeanSquaredError
from gpipe_cli.losses.token_cross_entropy import TokenCrossEntropy
from gpipe_cli.pipeline.gpipe import PlainPipe

FILES = sorted((Path(__file__).resolve().parents[2] / "conf" / "loss").glob("*.yaml"))


def pixels(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 4, 5, dtype=torch.double), torch.randint(3, (samples, 4, 5))


def classes(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 7, dtype=torch.double), torch.randint(7, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, 11, dtype=torch.double), torch.randint(11, (samples, 6))


def numbers(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 3, dtype=torch.double)


TASKS = {
    "cross_entropy": (CrossEntropy(0.1), classes, ["top1", "top5"]),
    "cross_entropy of pixels": (CrossEntropy(), pixels, ["mean_iou", "pixel_accuracy"]),
    "token_cross_entropy": (TokenCrossEntropy(0.1), tokens, ["token_accuracy", "bits_per_token"]),
    "dice": (Dice(), pixels, ["mean_iou", "pixel_accuracy"]),
    "mse": (MeanSquaredError(), numbers, ["mean_absolute_error"]),
}
Make = Callable[[int], tuple[Tensor, Tensor]]


@pytest.mark.parametrize(("loss", "make", "names"), TASKS.values(), ids=TASKS)
@settings(max_examples=25)
@given(samples=st.integers(1, 9), chunks=st.integers(1, 5), seed=st.integers(0, 99))
def test_loss_gradient_and_measures_do_not_depend_on_the_micro_batches(
    loss: Any, make: Make, names: list[str], samples: int, chunks: int, seed: int
) -> None:
    torch.manual_seed(seed)
    output, target = make(samples)
    whole = output.clone().requires_grad_()
    expected = loss(whole, target)
    expected.backward()
    total, divided = _in_micro_batches(loss, output, target, chunks)
    assert torch.allclose(total, expected, rtol=1e-12, atol=0)
    assert whole.grad is not None and torch.allclose(divided, whole.grad, rtol=1e-12, atol=1e-18)
    sums = loss.measure(output, target)
    assert list(sums) == names
    parts = [loss.measure(*pair) for pair in zip(output.split(2), target.split(2), strict=True)]
    assert sums == {name: pytest.approx(sum(part[name] for part in parts), rel=1e-5) for name in names}


def _in_micro_batches(loss: Any, output: Tensor, target: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    input = output.clone().requires_grad_()
    total = PlainPipe(nn.Sequential(nn.Identity()), chunks=chunks).step(input, target, loss, key=0)
    assert isinstance(total, Tensor) and input.grad is not None
    return total, input.grad


def test_losses_are_those_of_torch() -> None:
    scores, target = classes(5)
    assert torch.equal(CrossEntropy()(scores, target), nn.CrossEntropyLoss()(scores, target))
    assert torch.equal(MeanSquaredError()(scores, scores * 2), nn.MSELoss()(scores, scores * 2))
    scores, target = tokens(5)
    expected = nn.CrossEntropyLoss()(scores.transpose(1, 2), target)
    assert torch.allclose(TokenCrossEntropy()(scores, target), expected, rtol=1e-12)


def test_targets_may_be_probabilities() -> None:
    scores, _ = classes(5)
    target = scores.softmax(1)
    assert torch.equal(CrossEntropy()(scores, target), nn.CrossEntropyLoss()(scores, target))
    assert CrossEntropy().measure(scores, target) == {}


def test_a_perfect_mask_has_no_dice_loss_and_a_wrong_one_nearly_all() -> None:
    target = torch.tensor([[[0, 0], [1, 1]]])
    scores = 100 * torch.nn.functional.one_hot(target, 2).movedim(-1, 1).float()
    assert float(Dice()(scores, target)) == pytest.approx(0)
    assert float(Dice()(scores, 1 - target)) == pytest.approx(1)
    absent = torch.cat([scores, torch.full((1, 1, 2, 2), -100.0)], dim=1)
    assert float(Dice()(absent, target)) == pytest.approx(0)


@pytest.mark.parametrize(
    ("loss", "output", "target", "message"),
    [
        (
            CrossEntropy(),
            torch.zeros(2, 6, 11),
            torch.zeros(2, 6).long(),
            "shape [2, 6, 11] and targets of",
        ),
        (
            CrossEntropy(),
            (torch.zeros(2, 3),),
            torch.zeros(2).long(),
            "got an output of type tuple and",
        ),
        (TokenCrossEntropy(), torch.zeros(2, 3), torch.zeros(2).long(), "expects scores [samples, tokens,"),
        (Dice(), torch.zeros(2, 3), torch.zeros(2).long(), "a class for each pixel [samples, ...], got"),
        (
            MeanSquaredError(),
            torch.zeros(8, 1),
            torch.zeros(8),
            "of the same shape, got an output of shape [8, 1] and targets of shape [8];",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loss: Any, output: Any, target: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        loss(output, target)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing=1\.5: must be from 0 to 1"):
        CrossEntropy(1.5)
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing=-1: must be from 0 to 1"):
        TokenCrossEntropy(-1)


def test_a_loss_without_a_measure_gets_accuracy() -> None:
    scores, target = classes(5)
    assert list(measure_of(nn.NLLLoss())(scores, target)) == ["top1", "top5"]
    assert measure_of(nn.L1Loss())(*numbers(5)) == {}
    dice = Dice()
    assert measure_of(dice) == dice.measure


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_yaml_has_the_keys_of_its_loss_with_the_same_defaults(path: Path) -> None:
    written = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(written, dict)
    module, _, name = str(written.pop("_target_")).rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    if path.stem.startswith("auxiliary_"):  # for models whose heads have another weight
        defaults["weight"] = written["weight"]
    assert written == defaults
    assert f"gpipe_cli.losses.{path.stem}".startswith(module)
