from __future__ import annotations

import pytest
import torch

from gpipe_cli.torch_internals.fake_tensors import fake_tensors


def test_fake_tensors_can_be_entered_again_with_those_made_before() -> None:
    """A rank does so for every new shape of micro-batch, with the same sketch of its model."""
    fake = fake_tensors()
    with fake:
        before = torch.ones(2)
    with fake:
        assert (before + 1).shape == (2,)


def test_an_operator_that_refuses_its_inputs_raises_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """torch logged 20 lines of traceback for a model that does not fit its data, before the line of the error."""
    with fake_tensors(), pytest.raises(RuntimeError, match="same reduction dim"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not caplog.records
