"""Models whose cuts many tensors cross train in a pipe as they do alone: same bits after two steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.sequential import partition_uniform, to_sequential
from gpipe_cli.vision import torchvision


def densenet() -> nn.Module:
    model: nn.Module = torchvision.models.DenseNet(8, (12, 12), 8, num_classes=3)
    return model


def mvit() -> nn.Module:
    module = torchvision.models.video.mvit
    blocks = [
        module.MSBlockConfig(
            num_heads=heads,
            input_channels=channels,
            output_channels=channels,
            kernel_q=[3, 3, 3] if stride > 1 else [],
            kernel_kv=[3, 3, 3],
            stride_q=[1, stride, stride] if stride > 1 else [],
            stride_kv=[1, 2, 2],
        )
        for heads, channels, stride in ((1, 16, 1), (1, 16, 2), (2, 16, 1), (2, 16, 1))
    ]
    model: nn.Module = module.MViT(
        (16, 16), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=3,
    )  # fmt: skip
    return model


MODELS = {"densenet": (densenet, (4, 3, 32, 32)), "mvit": (mvit, (4, 3, 4, 16, 16))}


def two_steps(model: nn.Module, input: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(input).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_two_steps_in_a_pipe_give_the_bits_of_two_steps_alone(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    original, input = make().train(), torch.randn(shape)
    for module in original.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    start = copy.deepcopy(original.state_dict())
    sequence = to_sequential(copy.deepcopy(original), input)
    two_steps(original, input)
    for partitions in (2, 4):
        balance = [len(part) for part in partition_uniform(sequence, partitions)]
        for checkpoint in ("always", "except_last", "never"):
            sequence.load_state_dict(start)
            with GPipe(sequence, balance, devices=["cpu"] * partitions, checkpoint=checkpoint) as pipe:
                two_steps(pipe.train(), input)
            for key, tensor in original.state_dict().items():
                assert torch.equal(sequence.state_dict()[key], tensor), (balance, checkpoint, key)
