from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.engines.utilisation import Gauge


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 2), ("interleaved", 1)])
def test_a_step_tells_how_busy_each_partition_was(schedule: str, devices: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.randn(8, 8)
    with GPipe(module, [1, 2], devices=["cpu"] * devices, chunks=4, schedule=schedule) as pipe:
        gauge = Gauge(pipe)
        for _ in range(2):
            with gauge.reading():
                pipe.step(data, data, nn.functional.mse_loss)
        seen = gauge.last
        assert seen is not None and pipe.recorder is None
        assert len(seen.busy) == 2 and all(0 < share <= 1 for share in seen.busy)
        assert seen.bubble == pytest.approx(1 - sum(seen.busy) / devices)
        assert seen.memory == (None, None)


def test_a_step_that_fails_leaves_nothing_recording() -> None:
    with GPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"]) as pipe:
        gauge = Gauge(pipe)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), gauge.reading():
            pipe.step(torch.randn(2, 3), torch.randn(2, 8), nn.functional.mse_loss)
        assert pipe.recorder is None and gauge.last is None
