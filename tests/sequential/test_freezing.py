"""Frozen parameters have no gradient, and norms among them keep their statistics whatever mode their model is in."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.models import resnet
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.sequential import to_sequential
from gpipe_cli.sequential.deferred import meta_clone
from gpipe_cli.sequential.selection import freeze, keep_in_eval_mode, stays_in_eval_mode


def norms_in_train_mode(model: nn.Module) -> list[str]:
    return [
        name for name, part in model.named_modules() if isinstance(part, nn.BatchNorm2d) and part.training
    ]


def test_frozen_parameters_have_no_gradient_and_their_norms_stay_in_eval_mode() -> None:
    model = resnet.build()
    frozen = freeze(model, ["stem", "layer1"])
    assert frozen is not None
    assert str(frozen) == "15 tensors with 157,504 of 11,181,642 parameters: stem, layer1"
    model.train()
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == list(
        frozen.names
    )
    # Layers 0 to 2 are the stem and the blocks of layer1.
    assert norms_in_train_mode(model)[0].startswith("3.")
    assert len(norms_in_train_mode(model)) == 15
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.rand(2, 3, 32, 32))
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    assert changed and all(name.startswith(("layer2", "layer3", "layer4")) for name in changed)


def test_a_norm_with_one_trained_parameter_stays_in_train_mode() -> None:
    model = resnet.build()
    freeze(model, ["*.bn?.weight"])
    assert len(norms_in_train_mode(model.train())) == 20


def test_a_norm_without_parameters_is_frozen_with_the_layer_it_is_in() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    model = nn.Sequential(block, nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).train()
    freeze(model, ["0"])
    assert [norm.training for norm in model.train().modules() if isinstance(norm, nn.BatchNorm1d)] == [
        False,
        True,
    ]


def test_copies_of_a_frozen_norm_stay_in_eval_mode_by_themselves() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    keep_in_eval_mode(model[0])
    for other in (copy.deepcopy(model), meta_clone(model)):
        assert stays_in_eval_mode(other[0])
        model[0].training = True
        other.eval().train()
        assert other[0].training is False and other[1].training is True
        assert model[0].training is True


def test_deferred_batch_norm_leaves_frozen_norms_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    freeze(model, ["0"])
    with GPipe(model, [1, 2], chunks=2, deferred_batch_norm=True) as pipe:
        pipe(torch.rand(4, 2))
        assert type(pipe[0]) is nn.BatchNorm1d and type(pipe[2]) is DeferredBatchNorm
        assert int(pipe[0].num_batches_tracked) == 0
        assert int(pipe[2].num_batches_tracked) == 1


def test_a_traced_norm_that_is_frozen_keeps_its_statistics() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.other = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 2)

        def forward(self, input: Tensor) -> Tensor:
            scores: Tensor = self.head(self.other(self.norm(input).relu()))
            return scores

    sequence = to_sequential(Net(), torch.rand(3, 4))
    freeze(sequence, ["norm"])
    sequence.train()(torch.rand(3, 4))
    counts = {name: int(buffer) for name, buffer in sequence.named_buffers() if "tracked" in name}
    assert counts == {"norm.num_batches_tracked": 0, "other.num_batches_tracked": 1}


def test_freezing_everything_is_an_error() -> None:
    with pytest.raises(ConfigError, match=re.escape("freeze=[0,1]: freezes every parameter of the model")):
        freeze(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"])


def test_no_pattern_freezes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert freeze(model, []) is None
    assert all(parameter.requires_grad for parameter in model.parameters())
