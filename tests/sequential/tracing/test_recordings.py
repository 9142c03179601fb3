"""What a trace does about decisions on values, random numbers, and other sizes than the sample's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import to_sequential


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        if input.sum() > 0:  # the line that the error names
            return input
        output: Tensor = self.inner(input)
        return output


class BranchingAfterwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        value: Tensor = self.first(input)
        if value.sum() > 0:
            value = self.second(value)
        return value


def test_a_module_that_decides_on_values_stays_whole_and_decides_when_it_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branching()), nn.Linear(4, 4), nn.Linear(4, 4))
    sequence = to_sequential(model, torch.randn(2, 4))
    assert sequence.layer_names == ("0", "1.0", "2", "3")
    for input in (torch.randn(64, 2, 4) * 10).unbind():
        assert torch.equal(sequence(input), model(input))


def test_a_whole_model_that_decides_on_its_own_values_is_refused_with_the_line() -> None:
    with pytest.raises(ConfigError) as caught:
        to_sequential(BranchingAfterwards(), torch.randn(2, 4))
    pattern = (
        r"BranchingAfterwards cannot be traced: \S+test_recordings\.py:\d+ `if value\.sum\(\) > 0:`: it needs the "
        r"values of tensors that the model computes \(.*\); move that code into a submodule, .* "
        r"'model\.layers=\[first,second\]'"
    )
    assert re.fullmatch(pattern, str(caught.value)), caught.value


def test_a_decision_on_the_input_is_checked_in_every_batch() -> None:
    sequence = to_sequential(nn.Sequential(BranchingOnInput(), nn.Linear(4, 4)), torch.ones(2, 4))
    assert sequence(torch.ones(3, 4)).shape == (3, 4)
    with pytest.raises(
        RuntimeError,
        match=r"test_recordings\.py:\d+ `if input\.sum\(\) > 0.*` went on with True .* now it is False",
    ):
        sequence(-torch.ones(3, 4))


class BranchingOnInput(nn.Module):
    """Large enough not to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, input: Tensor) -> Any:
        if input.sum() > 0:
            input = input * 2
        return self.parts(input)


@pytest.mark.parametrize("leaf", ["1.0", "Branching"])
def test_a_leaf_is_chosen_by_path_or_by_class(leaf: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branching()), nn.Linear(4, 4))
    sequence = to_sequential(model, torch.randn(2, 4), leaves=[leaf])
    assert sequence.layer_names == ("0", "1.0", "2")
    input = torch.randn(2, 4)
    assert torch.equal(sequence(input), model(input))


def test_unknown_leaves_are_answered_with_close_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    with pytest.raises(
        ConfigError, match=r"Sequential has no submodule or class 'Branch'; close names: Branching"
    ):
        to_sequential(model, torch.randn(2, 4), leaves=["Branch"])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.inner(input) + torch.rand(4)
        return output


def test_random_numbers_are_drawn_again_in_every_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    sequence = to_sequential(model, torch.randn(2, 4))
    input = torch.randn(2, 4)
    torch.manual_seed(1)
    expected = [model(input), model(input)]
    torch.manual_seed(1)
    assert all(map(torch.equal, [sequence(input), sequence(input)], expected))
    assert not torch.equal(*expected)


class Attending(nn.Module):
    """Token ids and a mask, as a language model takes them; skips the mask where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 11)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, scale: int = 1
    ) -> dict[str, Tensor]:
        value = self.embed(input_ids)
        rows, length = input_ids.shape
        mask = None
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.view(rows, length, 1).to(value.dtype)
        for block in self.blocks:
            value = value + block(value).view(rows * length, 4).view(rows, length, 4) * scale
            if mask is not None:
                value = value * mask
        return {"logits": self.head(value)}


def batch(rows: int, length: int, padded: int = 0) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length - padded :] = 0
    return {"input_ids": torch.randint(11, (rows, length)), "attention_mask": mask}


def test_other_batch_sizes_and_lengths_padded_or_not_have_the_originals_bits() -> None:
    model = Attending()
    sequence = to_sequential(model, batch(2, 6))
    assert len(sequence) >= 6
    for rows, length, padded in ((1, 6, 0), (5, 9, 2), (3, 1, 0), (2, 40, 7), (4, 6, 3)):
        inputs = batch(rows, length, padded)
        expected = model(**inputs)["logits"]
        assert torch.equal(sequence(inputs)["logits"], expected)
        with GPipe(sequence, [2, len(sequence) - 2], devices=["cpu"] * 2, chunks=1) as pipe:
            assert torch.equal(pipe(inputs)["logits"], expected)


def test_a_batch_with_other_keys_or_sizes_is_refused() -> None:
    sequence = to_sequential(Attending(), {**batch(2, 6), "scale": 3})
    with pytest.raises(
        ValueError, match=r"the batch has input_ids, but the model was traced with input_ids, att"
    ):
        sequence({"input_ids": torch.zeros(2, 6, dtype=torch.int64)})
    inputs = {**batch(2, 6), "scale": 3}
    inputs["attention_mask"] = inputs["attention_mask"][:, 1:]
    with pytest.raises(
        ValueError,
        match=r"dimension 1 of attention_mask is 5 where another one is 6, .* sample in which they differ",
    ):
        sequence(inputs)
    with pytest.raises(
        ValueError, match=r"dimension 1 of input_ids is 9999, but the model was traced for sizes from"
    ):
        sequence({**batch(2, 9999), "scale": 3})


def test_a_mask_goes_straight_to_the_layers_that_use_it_and_no_further() -> None:
    sequence = to_sequential(Attending(), batch(2, 6))
    assert not isinstance(sequence[:-1](batch(2, 6)), tuple)  # the head receives the hidden states only
