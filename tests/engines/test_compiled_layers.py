"""compile=layers: compiled layers compute the same bits for every split, schedule and checkpoint mode."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from gpipe_cli import GPipe
from gpipe_cli.build.parts import _compile
from gpipe_cli.config.schema import LogConfig, TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.torch_internals.modules import compile_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = input + self.dropout(gelu(self.linear(input)))
        return output


class Prints(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        print("a break of the graph")  # noqa: T201
        return input


def gradients(balance: list[int], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), Block(), nn.Linear(8, 2))
    compile_layers(model)
    with GPipe(model, balance, devices=["cpu"] * len(balance), chunks=2, **options) as pipe:
        for step in range(2):  # a last micro-batch that is smaller
            loss = pipe.step(torch.ones(5, 4), torch.zeros(5, 2), mse_loss, key=step)
        found = [parameter.grad for parameter in pipe.parameters()]
    return [loss, *(gradient for gradient in found if gradient is not None)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler calls what torch deprecates
def test_compiled_layers_compute_the_same_bits_however_they_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", torch._dynamo.config.recompile_limit)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)
    expected = gradients([5], checkpoint="never")
    for options in ({"checkpoint": "always"}, {"schedule": "1f1b"}, {"schedule": "zero_bubble"}):
        found = gradients([2, 1, 2], **options)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), options
    broken = nn.Sequential(Prints())
    compile_layers(broken)
    with pytest.raises(Exception, match="Failed to trace builtin operator"):
        GPipe(broken, [1])(torch.ones(2, 2))


def test_what_compiled_layers_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"compile=layers: log\.layers=true has hooks on the layers"):
        _compile(TrainConfig(compile="layers", log=LogConfig(layers=True)), model)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile=layers: torch finds no compiler of C\+\+; install g\+\+"):
        _compile(TrainConfig(compile="layers"), model)
