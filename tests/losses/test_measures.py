"""Every metric against a count in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_cli.losses.measures import absolute_error, accuracy, segmentation_accuracy, token_accuracy


def count_top(scores: list[list[int]], targets: list[int], first: int) -> float:
    """How many targets are among the `first` best scores, counted one by one."""
    return sum(
        sum(other > row[target] for other in row) < first for row, target in zip(scores, targets, strict=True)
    )


@given(st.data(), st.integers(1, 9), st.integers(1, 6))
def test_top1_and_top5_count_correctly(data: st.DataObject, classes: int, samples: int) -> None:
    """Of up to five classes, each is among the first five."""
    scores = [data.draw(st.permutations(range(classes))) for _ in range(samples)]
    targets = data.draw(st.lists(st.integers(0, classes - 1), min_size=samples, max_size=samples))
    top5 = {"top5": count_top(scores, targets, 5)} if classes > 5 else {}
    top1 = {"top1": count_top(scores, targets, 1)}
    assert accuracy(torch.tensor(scores).float(), torch.tensor(targets)) == {**top1, **top5}


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(4, 3), torch.zeros(4, 3)),
        (torch.zeros(4, 3, 2, 2), torch.zeros(4, 2, 2, dtype=torch.long)),
        ((torch.zeros(4, 3),), torch.zeros(4, dtype=torch.long)),
    ],
)
def test_accuracy_needs_a_class_per_sample(output: object, target: torch.Tensor) -> None:
    assert accuracy(output, target) == {}


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 5), st.integers(0, 99))
def test_token_accuracy_and_bits_count_correctly(
    samples: int, tokens: int, vocabulary: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(samples, tokens, vocabulary, generator=generator)
    target = torch.randint(vocabulary, (samples, tokens), generator=generator)
    target[torch.rand(samples, tokens, generator=generator) < 0.3] = -100
    correct, bits = 0.0, 0.0
    for row, targets in zip(scores.tolist(), target.tolist(), strict=True):
        for token_scores, token in zip(row, targets, strict=True):
            if token != -100:
                correct += token_scores.index(max(token_scores)) == token
                bits -= math.log2(math.exp(token_scores[token]) / sum(map(math.exp, token_scores)))
    measured = token_accuracy(scores, target)
    expected = {"token_accuracy": pytest.approx(correct), "bits_per_token": pytest.approx(bits, rel=1e-4)}
    assert measured == expected


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_pixel_accuracy_and_iou_count_correctly(samples: int, pixels: int, classes: int, seed: int) -> None:
    """A class that is in neither the mask nor the prediction does not count."""
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randint(classes, (samples, pixels), generator=generator)
    target = torch.randint(classes, (samples, pixels), generator=generator)
    scores = torch.nn.functional.one_hot(predicted, classes).transpose(1, 2).float()
    iou, correct = 0.0, 0.0
    for guess, mask in zip(predicted.tolist(), target.tolist(), strict=True):
        pairs = list(zip(guess, mask, strict=True))
        present = set(guess) | set(mask)
        for label in present:
            union = sum(label in pair for pair in pairs)
            iou += sum(pair == (label, label) for pair in pairs) / union / len(present)
        correct += sum(a == b for a, b in pairs) / pixels
    measured = segmentation_accuracy(scores, target)
    assert measured == {"mean_iou": pytest.approx(iou), "pixel_accuracy": pytest.approx(correct)}


def test_errors_are_averaged_over_the_numbers_of_a_sample() -> None:
    output, target = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, -4.0]])
    assert absolute_error(output, target) == {"mean_absolute_error": 4.0}
    assert absolute_error(torch.tensor([1.0, 2.0]), torch.zeros(2)) == {"mean_absolute_error": 3.0}
