"""compile=layers: compiled layers compute the same bits for every split, schedule and checkpoint mode."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from gpipe_cli import GPipe
from gpipe_cli.build.parts import _compile
from gpipe_cli.config.schema import LogConfig, TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.torch_internals.modules import compile_layers
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import tiny_config


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


@pytest.fixture(autouse=True)
def limits_of_the_compiler() -> Iterator[None]:
    """compile_layers changes them for the rest of the process."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):
        yield


def gradients(balance: list[int], **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    of_torch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))
    model = nn.Sequential(nn.Linear(4, 8), Block(), of_torch, Block(), nn.Linear(8, 2))
    compile_layers(model)
    with GPipe(model, balance, devices=["cpu"] * len(balance), chunks=2, **options) as pipe:
        for step in range(2):  # a last micro-batch that is smaller
            loss = pipe.step(torch.ones(5, 4), torch.zeros(5, 2), mse_loss, key=step)
        found = [parameter.grad for parameter in pipe.parameters()]
    return [loss, *(gradient for gradient in found if gradient is not None)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler calls what torch deprecates
def test_compiled_layers_compute_the_same_bits_however_they_are_divided() -> None:
    expected = gradients([5], checkpoint="never")
    for options in ({"checkpoint": "always"}, {"schedule": "1f1b"}, {"schedule": "zero_bubble"}):
        found = gradients([2, 1, 2], **options)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), options
    broken = nn.Sequential(Prints())
    compile_layers(broken)
    with pytest.raises(Exception, match="Failed to trace builtin operator"):
        GPipe(broken, [1])(torch.ones(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_layers_of_torch_that_run_several_kernels_are_compiled_and_equal_ones_once() -> None:
    """Sequential and TransformerEncoderLayer ran uncompiled, without a word."""
    pairs = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(*pairs, encoder, nn.Linear(8, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(model)
    model(torch.ones(2, 3, 8, requires_grad=True)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_llama_resumes_with_another_split_and_schedule_in_the_same_bits(
    gpipe: Gpipe, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = tiny_config(vocab_size=256, num_key_value_heads=1)
    transformers().LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 20)
    train = ("train", "model=hf", "model.path=llama", "data=text", "data.path=text.txt", "data.context=16")
    shared = (*train, "compile=layers", "threads=1", "batch_size=8", "chunks=2", "steps=4", "eval=none")
    whole = gpipe(*shared, "partitions=2", "snapshot.every=2", "snapshot.keep=3", "run_dir=whole")
    assert whole.code == 0, whole.err
    torch._dynamo.reset()  # compiled again, as in a new process
    shutil.copytree("whole", "resumed")
    shutil.rmtree("resumed/snapshots/step-00000004")
    resumed = gpipe("train", "resume=resumed", "partitions=3", "schedule=1f1b", "checkpoint=always")
    assert resumed.code == 0 and "step-00000002" in resumed.err, resumed.err
    for name in ("model.safetensors", "optimizer.safetensors"):
        expected, found = (load_file(f"{run}/snapshots/step-00000004/{name}") for run in ("whole", "resumed"))
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name


def test_what_compiled_layers_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"compile=layers: log\.layers=true has hooks on the layers"):
        _compile(TrainConfig(compile="layers", log=LogConfig(layers=True)), model)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile=layers: torch finds no compiler of C\+\+; install g\+\+"):
        _compile(TrainConfig(compile="layers"), model)
