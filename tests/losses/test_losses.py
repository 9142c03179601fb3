"""A loss is a mean over samples, or over the labels it scores, whichever way a mini-batch is divided."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.losses.cross_entropy import AuxiliaryCrossEntropy, CrossEntropy, TokenCrossEntropy
from gpipe_cli.losses.dice import Dice
from gpipe_cli.losses.measures import measure_of
from gpipe_cli.losses.mse import MeanSquaredError
from gpipe_cli.pipeline.gpipe import plain_pipe

TARGET = torch.tensor([0, 2, 1, 2])
FILES = sorted((Path(__file__).resolve().parents[2] / "conf" / "loss").glob("*.yaml"))


def pixels(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 4, 5, dtype=torch.double), torch.randint(3, (samples, 4, 5))


def classes(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 7, dtype=torch.double), torch.randint(7, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6, 11, dtype=torch.double), torch.randint(11, (samples, 6))


def numbers(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, dtype=torch.double), torch.randn(samples, 3, dtype=torch.double)


def with_ignored(make: Make) -> Make:
    """About half of the labels are ignored, so micro-batches have different numbers of others, and some have none."""

    def make_with_ignored(samples: int) -> tuple[Tensor, Tensor]:
        output, target = make(samples)
        target[torch.rand(target.shape) < 0.5] = -100
        return output, target

    return make_with_ignored


Make = Callable[[int], tuple[Tensor, Tensor]]
TASKS = {
    "cross_entropy": (CrossEntropy(0.1), classes, ["top1", "top5"]),
    "cross_entropy of pixels": (CrossEntropy(), pixels, ["mean_iou", "pixel_accuracy"]),
    "token_cross_entropy": (TokenCrossEntropy(0.1), tokens, ["token_accuracy", "bits_per_token"]),
    "dice": (Dice(), pixels, ["mean_iou", "pixel_accuracy"]),
    "ignored classes": (CrossEntropy(), with_ignored(classes), ["top1", "top5"]),
    "ignored pixels": (CrossEntropy(0.1), with_ignored(pixels), ["mean_iou", "pixel_accuracy"]),
    "ignored tokens": (TokenCrossEntropy(), with_ignored(tokens), ["token_accuracy", "bits_per_token"]),
    "ignored tokens, smoothed": (
        TokenCrossEntropy(0.1),
        with_ignored(tokens),
        ["token_accuracy", "bits_per_token"],
    ),
    "dice of ignored pixels": (Dice(), with_ignored(pixels), ["mean_iou", "pixel_accuracy"]),
    "mse": (MeanSquaredError(), numbers, ["mean_absolute_error"]),
}


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
    if not (target != -100).any():
        expected = torch.zeros_like(expected)  # torch's mean of nothing is nan
    total, divided = _in_micro_batches(loss, output, target, chunks)
    assert torch.allclose(total, expected, rtol=1e-12, atol=0)
    assert whole.grad is not None and torch.allclose(divided, whole.grad, rtol=1e-12, atol=1e-18)
    sums = loss.measure(output, target)
    assert list(sums) == names
    parts = [loss.measure(*pair) for pair in zip(output.split(2), target.split(2), strict=True)]
    assert sums == {name: pytest.approx(sum(part[name] for part in parts), rel=1e-5) for name in names}


def _in_micro_batches(loss: Any, output: Tensor, target: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    input = output.clone().requires_grad_()
    total = plain_pipe(nn.Sequential(nn.Identity()), chunks=chunks).step(input, target, loss, key=0)
    assert isinstance(total, Tensor) and input.grad is not None
    return total, input.grad


def test_a_loss_of_yours_says_how_many_terms_each_row_has() -> None:
    """The mean of the positive numbers of the target. Its gradient for a micro-batch without any would be 0 / 0."""

    class MeanOfPositive(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output * (target > 0)).sum() / (target > 0).sum()

        def row_weights(self, target: Tensor) -> Tensor:
            return (target > 0).sum(1)

    output = torch.randn(4, 3, dtype=torch.double)
    target = torch.tensor([[1, 1, 1], [-1, -1, -1], [-1, 1, -1], [1, -1, -1]])
    whole = output.clone().requires_grad_()
    MeanOfPositive()(whole, target).backward()
    total, gradient = _in_micro_batches(MeanOfPositive(), output, target, 4)
    assert total == pytest.approx(output[target > 0].mean())
    assert whole.grad is not None and torch.allclose(gradient, whole.grad, rtol=1e-12)


def test_row_weights_that_do_not_fit_the_rows_are_refused() -> None:
    class Wrong(nn.MSELoss):
        def row_weights(self, target: Tensor) -> Tensor:
            return target.sum()

    with pytest.raises(ValueError, match=r"one number for each of 4 rows, got a tensor of shape \(\)"):
        _in_micro_batches(Wrong(), torch.zeros(4, 3), torch.zeros(4, 3), 2)


def test_a_mini_batch_without_a_scored_token_has_no_loss_and_no_gradient() -> None:
    output, target = tokens(4)
    total, gradient = _in_micro_batches(TokenCrossEntropy(0.1), output, torch.full_like(target, -100), 2)
    assert total == 0 and not gradient.any()


@pytest.mark.parametrize("make", [classes, pixels, tokens])
def test_an_empty_batch_weighs_nothing(make: Make) -> None:
    """A replica may get no samples of a short mini-batch."""
    assert CrossEntropy().row_weights(make(0)[1]).shape == (0,)


def test_losses_find_the_scores_in_an_output_of_transformers() -> None:
    class ModelOutput(OrderedDict[str, Tensor]):
        logits = property(lambda self: self["logits"])

    for loss, make in ((CrossEntropy(), classes), (TokenCrossEntropy(), tokens)):
        scores, target = make(3)
        for output in (ModelOutput(logits=scores), {"logits": scores}, SimpleNamespace(logits=scores)):
            assert torch.equal(loss(output, target), loss(scores, target))
            assert loss.measure(output, target) == loss.measure(scores, target)


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
            (torch.zeros(2, 3), torch.zeros(())),
            torch.zeros(2).long(),
            "got an output of type tuple and targets of shape [2]; give loss=own if the model computes its own loss",
        ),
        (
            TokenCrossEntropy(),
            torch.zeros(2, 1, 11),
            torch.zeros(2, 6).long(),
            "an output of shape [2, 1, 11] and targets of shape [2, 6]; give loss=own",
        ),
        (
            TokenCrossEntropy(),
            torch.zeros(2, 3),
            torch.zeros(2, 3).long(),
            "expects scores [samples, tokens,",
        ),
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


@pytest.mark.parametrize("loss", [CrossEntropy(), TokenCrossEntropy(), MeanSquaredError()])
def test_a_model_that_would_also_return_its_own_loss_returns_none_in_its_place(loss: Any) -> None:
    """minGPT returns (logits, None) where it gets no targets."""
    shape = {TokenCrossEntropy: (2, 6, 11), MeanSquaredError: (2, 6)}.get(type(loss), (2, 11, 6))
    scores = torch.randn(shape)
    target = torch.randn(2, 6) if isinstance(loss, MeanSquaredError) else torch.zeros(2, 6).long()
    assert loss((scores, None), target) == loss(scores, target)
    assert loss.measure((scores, None), target) == loss.measure(scores, target)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing=1\.5: must be from 0 to 1"):
        CrossEntropy(1.5)
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing=-1: must be from 0 to 1"):
        TokenCrossEntropy(-1)


def test_the_loss_of_tokens_takes_the_classes_of_samples_too() -> None:
    scores, target = classes(5)
    assert torch.equal(TokenCrossEntropy()(scores, target), CrossEntropy()(scores, target))
    assert TokenCrossEntropy().measure(scores, target) == CrossEntropy().measure(scores, target)


def test_a_loss_without_a_measure_gets_accuracy() -> None:
    scores, target = classes(5)
    assert list(measure_of(nn.NLLLoss())(scores, target)) == ["top1", "top5"]
    assert measure_of(nn.L1Loss())(*numbers(5)) == {}
    dice = Dice()
    assert measure_of(dice) == dice.measure


def test_each_auxiliary_head_counts_its_weight_in_a_tuple_and_in_a_dict() -> None:
    main, first, second = torch.randn(3, 4, 3)
    loss = AuxiliaryCrossEntropy(0.3)
    expected = (
        cross_entropy(main, TARGET) + 0.3 * cross_entropy(first, TARGET) + 0.3 * cross_entropy(second, TARGET)
    )
    assert torch.equal(loss((main, first, second), TARGET), expected)
    assert torch.equal(loss({"out": main, "a": first, "b": second}, TARGET), expected)


def test_a_single_output_without_auxiliary_ones_has_plain_cross_entropy() -> None:
    scores = torch.randn(4, 3)
    loss = AuxiliaryCrossEntropy(label_smoothing=0.1)
    expected = cross_entropy(scores, TARGET, label_smoothing=0.1)
    assert torch.equal(loss(scores, TARGET), expected)
    assert torch.equal(loss((scores,), TARGET), expected)


def test_only_the_main_output_of_several_is_measured() -> None:
    right = torch.eye(3)[TARGET]
    loss = AuxiliaryCrossEntropy()
    for output in (right, (right, 1 - right), {"out": right, "aux": 1 - right}):
        assert loss.measure(output, TARGET)["top1"] == 4
    assert measure_of(loss) == loss.measure


def test_pieces_of_a_batch_with_auxiliary_outputs_give_the_loss_of_the_whole() -> None:
    outputs, masks = torch.randn(2, 5, 3, 4, 4).double(), torch.randint(3, (5, 4, 4))
    loss = AuxiliaryCrossEntropy()
    pieces = [slice(0, 3), slice(3, 5)]
    parts = [loss(tuple(outputs[:, piece]), masks[piece]) * len(masks[piece]) / 5 for piece in pieces]
    torch.testing.assert_close(sum(parts), loss(tuple(outputs), masks), rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_an_auxiliary_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.weight={weight}: must be a finite number of at least 0"):
        AuxiliaryCrossEntropy(weight)


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
