"""Plans that are run: each puts the layers where its order has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli.plan.measured import verify_plans
from gpipe_cli.plan.prediction import Limit, Prediction
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import zero_bubble_v

pytestmark = pytest.mark.accelerator


def test_partitions_that_go_there_and_back_are_moved_there(accelerators: list[torch.device]) -> None:
    """Before each step they were put on the devices in turn."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plans = [
        Prediction(
            PlanShape(4, 2, 2, schedule, "never"),
            (1, 1, 1, 1),
            1.0,
            1.0,
            0.0,
            8,
            1.0,
            (),
            Limit("work", 0.0, {}),
            "threads",
        )
        for schedule in (FixedOrder("v", zero_bubble_v(4, 2, 2)), "interleaved")
    ]
    batch = torch.randn(8, 4), torch.randn(8, 4)
    verified = verify_plans(
        plans, model, lambda size: batch, nn.functional.mse_loss, accelerators[:2], cores=2, seconds=60
    )
    assert all(plan.measured_ms is not None for plan in verified)
