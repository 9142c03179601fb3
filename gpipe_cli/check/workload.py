"""What checks run: products long against starting a kernel and short for a check, and a small model that they train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe_cli.check.timing import median_seconds

WIDTHS = (128, 256, 512, 1024, 2048, 4096)
LONG_ENOUGH = 1e-3
"""Seconds of one product of square matrices; starting a kernel takes about 1e-5."""
WIDTH, SIZE, CLASSES = 16, 8, 10
"""Of the tokens, of the images, and of the output."""


def suitable_width(device: torch.device) -> int:
    """The smallest width whose product takes long enough, or the largest one."""
    for width in WIDTHS:
        if median_seconds(_product(device, width), [device], repeats=3) >= LONG_ENOUGH:
            break
    return width


def square_product(device: torch.device) -> Callable[[], Tensor]:
    """A function that multiplies two matrices of suitable width."""
    return _product(device, suitable_width(device))


def heavy_model(width: int, layers: int) -> nn.Sequential:
    """Linear layers of equal cost, so that any equal division is balanced."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _product(device: torch.device, width: int) -> Callable[[], Tensor]:
    left, right = (torch.ones(width, width, device=device) for _ in range(2))
    return lambda: left @ right


def small_model(blocks: int, *, dropout: float) -> nn.Sequential:
    """8 layers and the blocks, with one parameter tied; the values of its parameters are always the same."""
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    # In the first and in a last partition, as the embedding of a language model.
    second.weight = first.weight
    layers: list[nn.Module] = [
        nn.Conv2d(3, WIDTH, 3, padding=1, bias=False),  # batch norm takes the mean out: no gradient but noise
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(inplace=True),
        _Tokens(),
        first,
        *(_Attention(dropout) if block % 2 == 0 else _FeedForward(dropout) for block in range(blocks)),
        _Mean(),
        second,
        nn.Linear(WIDTH, CLASSES),
    ]
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def small_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Images and their classes, always the same."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (samples,), generator=generator)


class _Tokens(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=2, dropout=dropout, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        attended: Tensor = self.attention(normed, normed, normed, need_weights=False)[0]
        return tokens + attended


class _FeedForward(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        transformed: Tensor = self.layers(tokens)
        return tokens + transformed


class _Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)
