"""QLoRA: the frozen linear layers of a model in four bits per weight (NF4), in blocks of 64 with a scale each.

bitsandbytes quantizes and dequantizes, by operators that run without values and on every device it knows. Its layer
`Linear4bit` serves evaluation only in part: it keeps scales outside parameters and buffers, so they cannot be counted,
deferred or moved by an engine, and on some CPUs its evaluation replaces the weights by rounded ones. So the layer is
our own: one frozen parameter of bytes, which autograd saves instead of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import import_package
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.values import format_bytes

NF4 = "nf4"
TRANSPOSED = "Conv1D"
"""transformers' class of linear layers with a transposed weight."""
BLOCK = 64
"""Weights with a common scale, as in QLoRA."""
_PIECE = 2**20
"""Weights quantized at once: temporaries take ten times their memory."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer that has `packed` instead of `weight`: code that reads weights fails instead of erring."""

    packed: nn.Parameter

    def count_packed(self, parameter: nn.Parameter) -> int:
        """How many numbers one of its parameters is."""
        return self.in_features * self.out_features if parameter is self.packed else parameter.numel()

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        # The meta device has no autocast.
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        output: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, self.packed, bias, (self.out_features, self.in_features)
        )
        return output


class _Product(torch.autograd.Function):
    """As `linear`, but saves the packed weights for backward, and dequantizes them again."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return linear(input, dequantized(packed, shape, input.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantized(packed, ctx.shape, gradient.dtype), None, None, None


def quantize_frozen(model: nn.Module, say: Callable[[str], None] = lambda line: None) -> None:
    """Quantize the weights of frozen linear layers, except for the output embeddings and weights with several users.

    A weight in files stays there until it is read. say: prints what this saves.
    """
    import_package("bitsandbytes")
    chosen = _chosen(model)
    if not chosen:
        raise ConfigError(
            f"model.quantize={NF4}: {type(model).__name__} has no frozen linear layer; remove model.quantize"
        )
    before = sum(layer.weight.nbytes for layer in chosen)
    for layer in chosen:
        _quantize(layer)
    after = sum(layer.packed.nbytes for layer in chosen)
    say(
        f"model.quantize={NF4}: the weights of {len(chosen)} linear layers take {format_bytes(after)} instead of "
        f"{format_bytes(before)}"
    )


def _chosen(model: nn.Module) -> list[Any]:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    # Code around a module that transformers keeps in float32 reads its weight.
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    left = set(() if output is None else output.modules())
    users = Counter(parameter for part in model.modules() for parameter in part.parameters(recurse=False))
    return [
        part
        for name, part in model.named_modules()
        if (type(part) is nn.Linear or type(part).__name__ == TRANSPOSED)
        and part not in left
        and not any(f".{each}." in f".{name}.weight." for each in kept)
        and not any(parameter.requires_grad or users[parameter] > 1 for parameter in part.parameters())
    ]


def _quantize(layer: Any) -> None:
    weight = layer.weight
    if is_transposed := type(layer).__name__ == TRANSPOSED:
        layer.in_features, layer.out_features = weight.shape
    del layer.weight
    layer.__class__ = Nf4Linear
    if isinstance(weight, DeferredParameter):
        packed = nn.Parameter(
            torch.empty(_packed_bytes(weight.numel()), dtype=torch.uint8, device="meta"), requires_grad=False
        )
        layer.packed = DeferredParameter.of(packed, partial(_read, weight.read, is_transposed), weight.files)
    else:
        layer.packed = nn.Parameter(_quantized(weight.detach(), is_transposed), requires_grad=False)


def _read(read: Callable[[], Tensor], is_transposed: bool) -> Tensor:
    return _quantized(read(), is_transposed)


def _quantized(weight: Tensor, is_transposed: bool) -> Tensor:
    return quantized(weight.t() if is_transposed else weight)


def _packed_bytes(weights: int) -> int:
    return _code_bytes(weights) + 4 * -(-weights // BLOCK)


def _code_bytes(weights: int) -> int:
    """Two codes in a byte, in as many bytes as let the scales behind them begin at a multiple of four."""
    return -(-weights // 8) * 4


@torch.no_grad()
def quantized(weight: Tensor) -> Tensor:
    """The codes of all weights, then the scales of all blocks in float32, as bytes."""
    pieces = [
        torch.ops.bitsandbytes.quantize_4bit(piece, BLOCK, NF4, torch.uint8)
        for piece in torch.split(weight.reshape(-1), _PIECE)
    ]
    codes = torch.cat([codes.view(-1) for codes, _ in pieces])
    scales = torch.cat([scales for _, scales in pieces])
    return torch.cat([pad(codes, (0, _code_bytes(weight.numel()) - len(codes))), scales.view(torch.uint8)])


def dequantized(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    weights = shape[0] * shape[1]
    codes, scales = packed[: -(-weights // 2)], packed[_code_bytes(weights) :].view(torch.float32)
    # bitsandbytes knows no float64, in which a trace runs the model once.
    known = torch.float32 if dtype == torch.float64 else dtype
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, NF4, shape, known)
    return weight.to(dtype)
