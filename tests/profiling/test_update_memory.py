from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.profiling.update_memory import update_bytes

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
