from __future__ import annotations

import torch

from gpipe_cli.torch_internals.fake_tensors import fake_tensors


def test_fake_tensors_can_be_entered_again_with_those_made_before() -> None:
    """A rank does so for every new shape of micro-batch, with the same sketch of its model."""
    fake = fake_tensors()
    with fake:
        before = torch.ones(2)
    with fake:
        assert (before + 1).shape == (2,)
