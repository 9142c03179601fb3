"""The methods that measure nothing: manual, uniform and params, and the result that every method returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_cli.balance import balance_by_size, balance_by_time, manual, params, uniform
from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.errors import ConfigError

BOTH = pytest.mark.parametrize("balance_by", [balance_by_time, balance_by_size])
SAMPLE = torch.rand(8, 2)


@given(st.lists(st.integers(1, 20), min_size=1))
def test_a_manual_balance_that_covers_the_model_is_used_unchanged(layers: list[int]) -> None:
    assert manual.balance(sum(layers), layers).layers == layers


def test_a_manual_balance_that_does_not_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"balance.layers=\[4, 4\]: covers 8 layers, the model has 10"):
        manual.balance(10, [4, 4])


@given(st.integers(1, 200), st.data())
def test_uniform_spreads_layers_as_evenly_as_possible(layers: int, data: st.DataObject) -> None:
    partitions = data.draw(st.integers(1, layers))
    balance = uniform.balance(layers, partitions).layers
    assert len(balance) == partitions and sum(balance) == layers
    assert max(balance) - min(balance) <= 1 and min(balance) >= 1
    assert balance == sorted(balance, reverse=True), "the first partitions have the remainder"


def test_params_makes_the_largest_partition_as_small_as_possible() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 12, bias=False))
    result = params.balance(module, 2)
    assert result.layers == [3, 1]
    assert result.sums == [48, 48]
    assert result.imbalance == 1


def test_the_figures_of_a_result_are_those_of_its_partitions() -> None:
    result = BalanceResult.of([1, 3], [4.0, 1.0, 1.0, 2.0], "ms")
    assert result.sums == [4.0, 4.0]
    assert (result.largest, result.lower_bound, result.imbalance) == (4.0, 4.0, 1.0)
    assert BalanceResult.of([3, 1], [4.0, 1.0, 1.0, 2.0], "ms").lower_bound == 4.0


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))


CALLS: dict[str, Callable[..., list[int]]] = {
    "ours": lambda call, **more: call(model(), SAMPLE, 3, **more),
    "ours, named": lambda call, **more: call(model(), sample=SAMPLE, partitions=3, **more),
    "all named": lambda call, **more: call(partitions=3, module=model(), sample=SAMPLE, **more),
    "torchgpipe's": lambda call, **more: call(3, model(), SAMPLE, **more),
    "torchgpipe's, partly named": lambda call, **more: call(3, module=model(), sample=SAMPLE, **more),
    "torchgpipe's input": lambda call, **more: call(3, model(), input=SAMPLE, **more),
    "a numpy integer": lambda call, **more: call(numpy.int64(3), model(), SAMPLE, **more),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_partitions_in_front_gave_an_attribute_error_and_balance_now(call: Callable[..., list[int]]) -> None:
    by_time = call(balance_by_time, timeout=0.0, device="cpu")
    by_size = call(balance_by_size, chunks=2, param_scale=4.0, device=torch.device("cpu"))
    assert [len(by_time), sum(by_time)] == [3, 6]
    assert by_size == balance_by_size(model(), SAMPLE, 3, 2, 4.0)


@BOTH
@pytest.mark.parametrize(
    ("args", "named", "says"),
    [
        ((2, SAMPLE, model()), {}, "module must be an nn.Sequential, not a Tensor"),
        ((nn.Linear(2, 2), SAMPLE), {}, "module must be an nn.Sequential, not a Linear"),
        ((model(), SAMPLE, 2.0), {}, "partitions must be an integer, not a float"),
        ((2, model()), {"partitions": 2}, "partitions is given twice"),
        ((2, model(), SAMPLE), {"input": SAMPLE}, "sample is given twice"),
        ((2, model(), SAMPLE, 1), {}, "after partitions, module and sample, arguments are given by name"),
        ((2, model()), {}, "missing a required argument: 'sample'; call it as"),
        ((model(), SAMPLE), {"parts": 2}, "unexpected keyword argument 'parts'; call it as"),
    ],
)
def test_what_fits_neither_order_is_named(
    balance_by: Callable[..., list[int]], args: tuple[Any, ...], named: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{balance_by.__name__}: .*{says}"):
        balance_by(*args, **named)


@pytest.mark.parametrize(
    ("balance_by", "named", "says"),
    [
        (balance_by_time, {"chunks": 8}, "chunks=8 cannot be used; give one micro-batch as the sample"),
        (balance_by_time, {"param_scale": 4.0}, "param_scale=4.0 cannot be used; .* use balance_by_size"),
        (balance_by_size, {"timeout": 2.0}, "timeout=2.0 cannot be used; .* use balance_by_time"),
    ],
)
def test_a_keyword_of_the_other_method_is_refused_with_what_to_do(
    balance_by: Callable[..., list[int]], named: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        balance_by(2, model(), SAMPLE, **named)


@BOTH
def test_a_missing_device_is_refused(balance_by: Callable[..., list[int]]) -> None:
    with pytest.raises(IndexError, match="device 99 does not exist"):
        balance_by(2, model(), SAMPLE, device=99)


@BOTH
def test_more_partitions_than_layers_and_gradients_already_there_are_refused(
    balance_by: Callable[..., list[int]],
) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"layers: 1, partitions: 2"):
        balance_by(model, SAMPLE, partitions=2)
    model(SAMPLE).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        balance_by(model, SAMPLE, partitions=1)
