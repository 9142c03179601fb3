"""The check of a sequence before training: errors name the layer that does not fit; the check changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.build.layer_check import check_fit, check_input, check_outputs
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.context import current_microbatch
from gpipe_cli.skip import pop, skippable, stash

SAMPLE = torch.ones(2, 3)


class Given(nn.Module):
    """Runs the function it was given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Any:
        return self.function(input)


@skippable(stash=["kept"])
class Stash(nn.Module):
    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("kept", input)
        return input * 2


@skippable(pop=["kept"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        value = yield pop("kept")
        return input + value


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda value: {"a": {1}}, r"got set as output\['a'\]\. Between layers go tensors and plain values"),
        (lambda value: (value, object()), r"expected Tensor, but got object as output\[1\]\. "),
        (lambda value: (1, None), r"its output, of type tuple, holds no tensor\. "),
    ],
)
def test_what_no_pipe_carries_is_refused_with_layer_type_and_cure(function: Any, problem: str) -> None:
    sequence = nn.Sequential(nn.Linear(3, 3), Given(function))
    expected = rf"^layer '1' \(Given\) returns what no pipe carries: .*{problem}.* in one module$"
    for check in (lambda: check_fit(sequence, SAMPLE, "do this"), lambda: check_outputs(sequence, SAMPLE)):
        with pytest.raises(ConfigError, match=expected):
            check()


def test_a_layer_that_looks_at_values_is_tried_with_values() -> None:
    sequence = nn.Sequential(Given(lambda value: value.item() if value.is_meta else {value}))
    with pytest.raises(ConfigError, match=r"layer '0' \(Given\) .* got set as output\. .* in one module"):
        check_fit(sequence, SAMPLE, "do this")


def test_containers_and_plain_values_between_layers_fit() -> None:
    sequence = nn.Sequential(
        Given(lambda value: {"a": [value, None, "name"]}), Given(lambda value: value["a"][0])
    )
    check_fit(sequence, SAMPLE, "do this")
    check_outputs(sequence, SAMPLE)


def test_a_list_that_does_not_fit_is_refused_with_what_the_layer_was_given() -> None:
    sequence = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 1))
    with pytest.raises(ConfigError, match=r"^layer '1' \(Linear\) does not take 2x4: mat1 and .*; do this$"):
        check_fit(sequence, SAMPLE, "do this")
    with pytest.raises(ConfigError, match=r"^layer '1' \(Linear\) does not take 2x4: .*; do this$"):
        check_fit(copy.deepcopy(sequence).to("meta"), SAMPLE, "do this")


def test_a_layer_that_raises_of_itself_is_left_to_the_first_step() -> None:
    def fail(value: Tensor) -> Tensor:
        raise ZeroDivisionError

    check_outputs(nn.Sequential(Given(fail)), SAMPLE)


def test_what_a_pipe_can_run_passes_and_is_left_as_it_was() -> None:
    def look(value: Tensor) -> Tensor:
        assert current_microbatch() is not None
        return value if value.sum().item() > 0 else value + torch.rand(3)

    sequence = nn.Sequential(Stash(), nn.BatchNorm1d(3), nn.Dropout(), Given(look), Pop(), nn.Linear(3, 1))
    state, random = copy.deepcopy(sequence.state_dict()), torch.get_rng_state()
    check_fit(sequence, SAMPLE, "do this")
    check_outputs(sequence, SAMPLE)
    assert all(torch.equal(tensor, state[name]) for name, tensor in sequence.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


KEYWORDS = {"ids": torch.ones(2, 3), "scale": 2}


def test_a_model_of_one_tensor_refuses_data_of_several() -> None:
    message = r"layer '0' \(Linear\) does not take a dict of ids 2x3 and scale 2: .*; choose a model that takes such"
    with pytest.raises(ConfigError, match=message):
        check_input(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), KEYWORDS)
    with pytest.raises(ConfigError, match=r"does not take 2x3 and 2x3: "):
        check_input(nn.Sequential(nn.Linear(3, 3)), (SAMPLE, SAMPLE.clone()))


def test_a_model_of_keyword_arguments_takes_them_and_a_layer_that_looks_at_values_is_left_to_the_first_step() -> (
    None
):
    check_input(nn.Sequential(Given(lambda given: given["ids"] * given["scale"]), nn.Linear(3, 3)), KEYWORDS)
    check_input(nn.Sequential(Given(lambda given: given["ids"] * given["ids"].sum().item())), KEYWORDS)
    check_input(nn.Sequential(nn.Linear(3, 3)), SAMPLE)
    check_fit(nn.Sequential(Given(lambda given: given["ids"]), nn.Linear(3, 3)), KEYWORDS, "do this")
