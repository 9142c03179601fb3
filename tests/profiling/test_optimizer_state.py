from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.profiling.optimizer_state import state_bytes, update_bytes

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "adafactor": torch.optim.Adafactor,
}


def enumerate_names(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_what_the_optimizer_really_keeps(make: Any) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((), (4,), (2, 2), (6, 4, 3, 3), (1, 5))]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = [
        sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        for parameter in parameters
    ]
    assert state_bytes(make, enumerate_names(parameters)) == expected


def test_a_frozen_parameter_needs_nothing_and_a_huge_one_no_memory() -> None:
    parameters = [nn.Parameter(torch.empty(2**20, 2**20, device="meta")), nn.Parameter(torch.ones(3), False)]
    assert state_bytes(torch.optim.AdamW, enumerate_names(parameters)) == [2 * 4 * 2**40 + 4, 0]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "settings", "copies"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, 2),
        ("AdamW", {"foreach": False}, 4),
        ("AdamW", {"foreach": True}, 3),
        ("AdamW", {"fused": True}, 2),
        ("Adam", {"foreach": True, "amsgrad": True}, 4),
    ],
    ids=str,
)
def test_an_update_takes_its_temporaries_and_the_state_that_it_creates(
    name: str, settings: dict[str, Any], copies: int
) -> None:
    large, small = (nn.Parameter(torch.zeros(size)) for size in (1000, 10))
    frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
    sizes = update_bytes(
        lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **settings),
        [large, frozen, small],
        CPU,
    )
    assert sizes == [pytest.approx(copies * 4000, rel=0.01), 0, pytest.approx(copies * 40, rel=0.01, abs=1)]
