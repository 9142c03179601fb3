"""An error about untraceable code names the module, the line and the cure; and the cure works."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

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


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.inner(input) + torch.rand(4)
        return output


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs[0])
        return output


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branching()), nn.Linear(4, 4))


def test_the_error_names_module_line_and_cure() -> None:
    with pytest.raises(ConfigError) as caught:
        to_sequential(MODEL, torch.randn(2, 4))
    pattern = (
        r"'1\.0' \(Branching\) cannot be traced: \S+test_tracer\.py:\d+ `if input\.sum\(\) > 0:.*`: "
        r"symbolically traced variables.*; mark it as a leaf with model\.leaves=\[1\.0\], or give model\.layers"
    )
    assert re.fullmatch(pattern, str(caught.value)), caught.value


@pytest.mark.parametrize("leaf", ["1.0", "Branching"])
def test_a_leaf_by_path_or_by_class_is_the_cure(leaf: str) -> None:
    sequence = to_sequential(MODEL, torch.randn(2, 4), leaves=[leaf])
    assert sequence.layer_names == ("0", "1.0", "2")
    input = torch.randn(2, 4)
    assert torch.equal(sequence(input), MODEL(input))


def test_a_failing_root_has_no_leaf_to_mark() -> None:
    with pytest.raises(ConfigError, match=r"^Branching cannot be traced: .*; give model\.layers$"):
        to_sequential(Branching(), torch.randn(2, 4))


def test_unknown_leaves_are_answered_with_close_names() -> None:
    with pytest.raises(
        ConfigError, match=r"Sequential has no submodule or class 'Branch'; close names: Branching"
    ):
        to_sequential(MODEL, torch.randn(2, 4), leaves=["Branch"])


def test_noise_that_would_be_the_same_for_ever_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sequential draws random numbers whose shape does not depend"):
        to_sequential(nn.Sequential(nn.Linear(4, 4), Noisy()), torch.randn(2, 4))


def test_a_forward_of_any_number_of_arguments_is_given_those_of_the_sample() -> None:
    sequence = to_sequential(Optional(), (torch.randn(2, 4),))
    assert sequence((torch.ones(2, 4),)).shape == (2, 4)
