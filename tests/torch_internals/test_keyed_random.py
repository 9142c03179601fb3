"""The dispatch mode: random ops get our generator, all others are left as they are."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss

from gpipe_cli.pipeline.plain import PlainPipe
from gpipe_cli.torch_internals.keyed_random import KeyedRandom, UnkeyedRandomError

IMAGES, ROWS, TOKENS = (2, 3, 8, 8), (4, 16), (4, 7, 16)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(16, 16), ROWS),
        (nn.Linear(16, 16), TOKENS),
        (nn.Conv2d(3, 4, 3), IMAGES),
        (nn.BatchNorm2d(3), IMAGES),
        (nn.LayerNorm(16), TOKENS),
        (nn.GroupNorm(1, 3), IMAGES),
        (nn.MaxPool2d(2), IMAGES),
        (nn.GELU(), ROWS),
        (nn.GRU(16, 16, 2), TOKENS),
        (nn.LSTM(16, 16, bidirectional=True), TOKENS),
        (nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), TOKENS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_a_layer_that_draws_nothing_gives_the_same_bits_under_the_mode(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """A layer runs under the mode once, to be learnt: that must not show in a run, resumed or not."""
    input = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()

    def results(random: KeyedRandom | None) -> list[Tensor | None]:
        with contextlib.nullcontext() if random is None else random.reseed(1):
            output = layer(input)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        gradients = [tensor.grad for tensor in (input, *layer.parameters())]
        input.grad = None
        layer.zero_grad()
        return [output, *gradients]

    random = KeyedRandom()
    for plain, keyed in zip(results(None), results(random), strict=True):
        assert torch.equal(plain, keyed)
    assert not random.drew


def test_seeds_decide_what_is_drawn_and_the_default_generator_stays() -> None:
    random = KeyedRandom()

    def draw(seed: int) -> Tensor:
        with random.reseed(seed):
            return torch.rand(4) + functional.dropout(torch.ones(4), 0.5)

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(state, torch.get_rng_state())


def test_whether_anything_drew_is_known() -> None:
    random = KeyedRandom()
    with random.reseed(0):
        torch.ones(3).sin()
    assert not random.drew
    with random.reseed(0):
        torch.bernoulli(torch.full((3,), 0.5))
    assert random.drew


def test_the_fused_dropout_of_cuda_is_replaced_by_an_equal() -> None:
    input = torch.ones(1000, requires_grad=True)
    with KeyedRandom().reseed(3):
        output, mask = torch.native_dropout(input, 0.25, True)
    output.sum().backward()
    assert torch.equal(output != 0, mask)
    assert torch.equal(output[mask], torch.full_like(output[mask], 1 / 0.75))
    assert torch.equal(input.grad, output)
    assert 0.7 < mask.float().mean() < 0.8


def test_an_op_that_takes_no_generator_is_refused_by_name_only_if_it_would_draw() -> None:
    query = torch.randn(1, 1, 4, 4)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with KeyedRandom().reseed(0):
        attention(query, query, query)
        with pytest.raises(UnkeyedRandomError, match=r"flash_attention_for_cpu.* no generator"):
            attention(query, query, query, 0.5)


def test_a_step_does_not_import_the_compiler() -> None:
    """torch hides a dispatch mode from its compiler by importing it: two seconds at everybody's first step."""
    script = (
        "import sys, torch\n"
        "from gpipe_cli import GPipe\n"
        "pipe = GPipe(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), [1, 1], chunks=2)\n"
        "pipe.step(torch.rand(4, 4), torch.rand(4, 4), torch.nn.functional.mse_loss)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_compiled_layer_draws_under_its_key_without_being_compiled_anew() -> None:
    """Hidden after all where there is a compiler: else it recompiled until it gave up, and said so."""

    def losses() -> list[float]:
        torch.manual_seed(0)
        layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), backend="eager")
        pipe = PlainPipe(nn.Sequential(layer, nn.Linear(8, 2)), chunks=4)
        return [float(pipe.step(torch.ones(8, 8), torch.zeros(8, 2), mse_loss, key=key)) for key in (1, 2, 1)]

    compiled = losses()
    assert compiled[0] == compiled[2] != compiled[1]
