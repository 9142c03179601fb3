"""Fused attention with dropout draws from its layer's key, although its kernel takes no generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from gpipe_cli import GPipe
from gpipe_cli.models import gpt
from gpipe_cli.pipeline.layer import UnkeyedRandomWarning
from tests.accelerator.simulator import loaded

pytestmark = [pytest.mark.accelerator, pytest.mark.timeout(120)]

Devices = list[torch.device]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention


class FusedAttention:
    """Stands for torch's flash attention on a simulated device: its forward draws from the default generator of the
    device, and hands the seed to its backward.
    """

    def __init__(self) -> None:
        self.calls = 0

    def choose(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        output: Tensor = FLASH(query, key, value, dropout_p, is_causal)[0]
        return output

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        self.calls += 1
        seed = torch.tensor(draw_seed(query.device) if dropout_p else 0)
        weights = _weights(query, key, is_causal, scale)
        output = (weights * _mask(seed, weights, dropout_p)) @ value
        nothing = torch.empty(0, device=query.device)
        log_sum = torch.empty(query.shape[:-1], device=query.device)
        lengths = (nothing, nothing, query.shape[-2], key.shape[-2])
        return output, log_sum, *lengths, seed, torch.tensor(0), nothing

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        *rest: Any,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        dropout_p, is_causal, seed = rest[4], rest[5], rest[6]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        weights = _weights(query, key, is_causal, scale)
        mask = _mask(seed, weights, dropout_p)
        of_weights = (gradient @ value.transpose(-1, -2)) * mask
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        return (
            of_scores @ key,
            of_scores.transpose(-1, -2) @ query,
            (weights * mask).transpose(-1, -2) @ gradient,
        )


def draw_seed(device: torch.device) -> int:
    """A number of the default generator, which advances; as a kernel does it, without an operator."""
    module = torch.get_device_module(device)
    digest = hashlib.sha256(bytes(module.get_rng_state(device).tolist())).digest()
    seed = int.from_bytes(digest[:7], "little")
    generator = torch.Generator(device).manual_seed(seed)
    module.set_rng_state(generator.get_state(), device)
    return seed


def _weights(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1)


def _mask(seed: Tensor, weights: Tensor, dropout_p: float) -> Tensor:
    """From the seed alone, by arithmetic that no key reaches."""
    places = torch.arange(weights.numel(), dtype=torch.float64).reshape(weights.shape)
    uniform = ((places * 12.9898 + int(seed) % 9973).sin() * 43758.5453).frac().abs()
    kept = (uniform >= dropout_p).to(weights.dtype) / (1 - dropout_p)
    return kept.to(weights.device)


@pytest.fixture
def fused(accelerators: Devices) -> Iterator[FusedAttention | None]:
    """None on a real device, which brings its own fused attention."""
    simulated = loaded()
    if simulated is None:
        yield None
        return
    if simulated.build != "cuda":
        pytest.skip("flash attention has a backward for CUDA only")
    attention = FusedAttention()
    with torch.library._scoped_library("aten", "IMPL") as library:
        # torch chooses the math kernel for simulated devices.
        library.impl("scaled_dot_product_attention", attention.choose, "AutogradCUDA")
        library.impl("_scaled_dot_product_flash_attention", attention.forward, "CUDA")
        library.impl("_scaled_dot_product_flash_attention_backward", attention.backward, "CUDA")
        yield attention


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over its own input, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.attention(input, input, input, need_weights=False)[0]
        return input + output


def model() -> nn.Sequential:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
    return nn.Sequential(SelfAttention(), encoder, gpt.Block(8, 2, 0.3, 3), SelfAttention())


def results(devices: Devices, balance: list[int], **options: Any) -> list[Tensor]:
    pipe = GPipe(model(), balance, devices=devices, chunks=3, **options)
    rows = torch.linspace(-1, 1, 6 * 5 * 8).reshape(6, 5, 8)
    with pipe:
        losses = [
            pipe.step(rows.to(pipe.devices[0]), rows.to(pipe.output_device), mse_loss, key=key)
            for key in (1, 2)
        ]
        return [tensor.cpu() for tensor in (*losses, *(parameter.grad for parameter in pipe.parameters()))]


@pytest.mark.filterwarnings(f"error::{UnkeyedRandomWarning.__module__}.{UnkeyedRandomWarning.__name__}")
def test_masks_depend_on_the_key_alone(accelerators: Devices, fused: FusedAttention | None) -> None:
    """Fused attention was warned of and drew from the default generator: recompute used another mask."""
    torch.manual_seed(0)  # as `model` does
    states = [torch.get_device_module(device).get_rng_state(device) for device in accelerators]
    expected = results(accelerators[:1], [4])
    assert not torch.equal(expected[0], expected[1])
    assert fused is None or fused.calls > 0
    four = (accelerators * 4)[:4]
    for mine in (
        results(accelerators[:1], [4], checkpoint="always"),
        results(four[::-1][:2], [1, 3], schedule="1f1b", checkpoint="always"),
        results(four, [1, 1, 1, 1], schedule="zero_bubble", checkpoint="never"),
        results([accelerators[0]] * 2, [2, 2], schedule="1f1b"),
    ):
        assert [torch.equal(*pair) for pair in zip(mine, expected, strict=True)] == [True] * len(expected)
    # Lent to the kernels for a moment only.
    for device, state in zip(accelerators, states, strict=True):
        assert torch.equal(torch.get_device_module(device).get_rng_state(device), state)


def test_draws_before_and_after_a_fused_kernel_do_not_repeat_its_numbers(
    accelerators: Devices, fused: FusedAttention | None
) -> None:
    """The state that the kernel leaves is where the layer's next draw begins."""
    drawn: list[Tensor] = []

    class Draws(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            drawn.append(torch.rand(4, device=input.device))
            attended = scaled_dot_product_attention(input, input, input, dropout_p=0.5)
            drawn.append(torch.rand(4, device=input.device))
            return attended

    with GPipe(nn.Sequential(Draws()), [1], devices=accelerators[:1]) as pipe:
        for _ in range(2):
            torch.manual_seed(0)
            pipe(torch.ones(1, 2, 4, 8, device=accelerators[0]))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
