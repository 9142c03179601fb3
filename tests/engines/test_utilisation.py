from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.engines.pipe_engine import UtilisationMeter


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 2), ("interleaved", 1)])
def test_a_step_tells_how_busy_each_partition_was(schedule: str, devices: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.randn(8, 8)
    with GPipe(module, [1, 2], devices=["cpu"] * devices, chunks=4, schedule=schedule) as pipe:
        meter = UtilisationMeter(pipe)
        for _ in range(2):
            with meter.measure():
                pipe.step(data, data, nn.functional.mse_loss)
        utilisation = meter.last
        assert utilisation is not None and pipe.recorder is None
        assert len(utilisation.busy) == 2 and all(0 < share <= 1 for share in utilisation.busy)
        assert utilisation.bubble == pytest.approx(1 - sum(utilisation.busy) / devices)
        assert utilisation.memory == (None, None)


def test_a_step_that_fails_leaves_nothing_recording() -> None:
    with GPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"]) as pipe:
        meter = UtilisationMeter(pipe)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), meter.measure():
            pipe.step(torch.randn(2, 3), torch.randn(2, 8), nn.functional.mse_loss)
        assert pipe.recorder is None and meter.last is None
