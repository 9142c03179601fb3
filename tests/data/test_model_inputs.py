"""Samples whose input is a dict or a tuple of tensors: the arguments of a model."""

from __future__ import annotations

import multiprocessing
import threading
from collections import UserDict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpipe_cli.data import pair, transforms
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.generated import build_synthetic
from gpipe_cli.data.loading import batches
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput, flatten

# torch warns if there are more workers than cores, which depends on the machine.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
KEYS: dict[str, Any] = {"batch_size": 3, "seed": 0, "epoch": 1, "shuffle": True}


class Sentences:
    """Tokens and a mask; `form` makes the input of them."""

    def __init__(self, form: Any = dict, length: int = 7) -> None:
        self._form, self._length = form, length

    def __len__(self) -> int:
        return self._length

    def tokens(self, index: int) -> Tensor:
        return torch.arange(4) + index

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        tokens = self.tokens(index)
        return self._form({"input_ids": tokens, "attention_mask": tokens > 2}), tokens + 1


class Padded(Sentences):
    """Sentences of different lengths, padded to the longest of a batch."""

    def tokens(self, index: int) -> Tensor:
        return torch.arange(1, index + 2)

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = [self.tokens(index) for index in indices.tolist()]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": tokens, "attention_mask": tokens > 0}, tokens.where(tokens > 0, -100)


def as_tuple(input: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(input.values())


def assert_equal_batches(left: Iterable[tuple[Any, Tensor]], right: Iterable[tuple[Any, Tensor]]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        (tensors, template), (others, other) = flatten(mine, "batch"), flatten(theirs, "batch")
        assert template == other and all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("form", [dict, as_tuple])
def test_each_argument_becomes_a_batch(form: Any) -> None:
    ((input, target),) = batches(Sentences(form, 2), **{**KEYS, "shuffle": False})
    ids, mask = input.values() if isinstance(input, dict) else input
    assert type(input) is (dict if form is dict else tuple)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 2, 3, 4]] and target.tolist() == (ids + 1).tolist()
    assert mask.dtype == torch.bool and torch.equal(mask, ids > 2)


def test_values_that_are_no_tensors_and_mappings_that_are_no_dicts_become_keyword_arguments() -> None:
    """A tokenizer of Hugging Face returns a BatchEncoding, which is a UserDict."""
    samples = Sentences(lambda input: UserDict({**input, "use_cache": False}))
    input, _ = next(batches(samples, **KEYS))
    assert isinstance(input, dict) and input.pop("use_cache") is False
    assert_equal_batches([(input, torch.zeros(0))], [(next(batches(Sentences(), **KEYS))[0], torch.zeros(0))])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "samples", [Sentences(), Sentences(as_tuple), Padded()], ids=["dict", "tuple", "padded"]
)
def test_workers_and_pinned_memory_change_nothing(samples: Any, workers: int, pinned: list[str]) -> None:
    """Batches were not pinned. torch itself would return a pinned tuple as a list."""
    expected = list(batches(samples, **KEYS))
    assert_equal_batches(batches(samples, pin_memory=True, workers=workers, **KEYS), expected)
    main = threading.main_thread().name
    assert len(pinned) == 3 * len(expected) and all((name == main) == (workers == 0) for name in pinned)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("samples", [Sentences(), build_synthetic(length=7).train], ids=["dict", "in memory"])
def test_replicas_together_read_the_batches_of_a_single_process(samples: Any) -> None:
    """Seven samples in batches of three: the last batch has one sample, so two of three replicas get none."""
    whole = list(batches(samples, **KEYS))
    replicas = [list(batches(samples, replica=index, replicas=3, **KEYS)) for index in range(3)]
    rows = [[len(target) for _, target in replica] for replica in replicas]
    assert rows == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    for *parts, (input, target) in zip(*replicas, whole, strict=True):
        of_parts = [flatten(part, "batch") for part, _ in parts]
        tensors, template = flatten(input, "batch")
        assert all(own == template for _, own in of_parts)
        assert torch.equal(torch.cat([part for _, part in parts]), target)
        columns = zip(*(own for own, _ in of_parts), strict=True)
        assert all(map(torch.equal, map(torch.cat, columns), tensors))


class Ragged(Sentences):
    def tokens(self, index: int) -> Tensor:
        return torch.arange(2 + index)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            Ragged(),
            r"sample 1: has the shape \[3\], but sample 0 of the same batch has \[2\]; pad the samples",
        ),
        (
            Sentences(
                lambda input: input if input["input_ids"][0] != 1 else {"input_ids": input["input_ids"]}
            ),
            "sample 1: differs from sample 0 of the same batch in the names or number of its tensors",
        ),
        (
            Sentences(lambda input: {**input, "text": object()}),
            r"sample 0: TypeError: expected Tensor, but got object as input\['text'\]",
        ),
    ],
    ids=["lengths", "keys", "objects"],
)
def test_samples_that_do_not_fit_together_are_named(samples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        next(batches(samples, **{**KEYS, "shuffle": False}))


class Doubling:
    """A transform that takes the arguments of a model."""

    def __init__(self, random: bool) -> None:
        self.random = random

    def __call__(self, input: Any, generator: torch.Generator | None) -> ModelInput:
        return {**input, "input_ids": 2 * input["input_ids"]}


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("samples", [Sentences(), Padded(length=3)], ids=["one by one", "together"])
def test_a_transform_of_your_own_gets_the_input_as_it_is(samples: Any, random: bool) -> None:
    input, _ = next(batches(samples, transform=Doubling(random), **KEYS))
    plain, _ = next(batches(samples, **KEYS))
    assert isinstance(input, dict) and isinstance(plain, dict)
    assert torch.equal(input["input_ids"], 2 * plain["input_ids"])
    assert torch.equal(input["attention_mask"], plain["attention_mask"])


@pytest.mark.parametrize("transform", [transforms.basic, transforms.augment])
def test_a_transform_of_images_refuses_inputs_of_several_tensors(transform: Any) -> None:
    data = Data(Sentences(), Sentences(), classes=9, shape=(3, 4, 4), mean=(0.0,) * 3, std=(1.0,) * 3)
    message = (
        f"transform={transform.__name__}: needs inputs that are one tensor, and the data has a dict; choose"
    )
    with pytest.raises(ConfigError, match=message):
        transform(data)
    text = Data(Sentences(), Sentences(), classes=9, shape=(4,))
    assert transforms.basic(text).train is None, "without a mean there is nothing to do"


def test_a_pair_of_datasets_may_return_arguments_and_may_pad_them() -> None:
    data = pair.build(Padded(), Sentences(), classes=9)
    assert data.shape == (1,) and isinstance(data.test[0][0], dict)
    input, target = next(batches(data.train, **KEYS))
    assert isinstance(input, dict) and input["input_ids"].shape == target.shape


@pytest.mark.parametrize(
    ("samples", "size", "message"),
    [
        (Sentences(), 8, "returns a dict as input, which data.size=8 cannot scale; remove data.size"),
        (
            Sentences(lambda input: "text"),
            None,
            "returns a str as input; it must return an image, a tensor, or a",
        ),
        (Sentences(lambda input: [object()]), None, r"expected Tensor, but got object as input\[0\]"),
    ],
    ids=["size", "text", "object"],
)
def test_a_pair_of_datasets_refuses_what_is_no_input(samples: Any, size: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pair.build(samples, samples, classes=9, size=size)
