"""Examples of your own models for gpipe, one function each; docs/how-to/your-own-model.md trains them all.

gpipe train model=mynet:residual
"""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor, nn

from gpipe_cli.skip import pop, skippable, stash


def plain(num_classes: int, width: int = 16) -> nn.Sequential:
    """A sequence: its children are the layers."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = input + self.norm(self.conv(input)).relu()
        return output


class Residual(nn.Module):
    """Not a sequence, and written without pipelines in mind."""

    def __init__(self, num_classes: int, width: int, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2)
        self.blocks = nn.Sequential(*(block(width) for _ in range(4)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.head(self.pool(self.blocks(self.stem(input))).flatten(1))
        return output


def residual(num_classes: int, width: int = 16) -> nn.Module:
    return Residual(num_classes, width, Block)


class Choosy(Residual):
    """Decides by the values of its features, which a trace of the whole model cannot follow."""

    def forward(self, input: Tensor) -> Tensor:
        features = self.stem(input)
        if features.mean() > 0:
            features = self.blocks(features)
        output: Tensor = self.head(self.pool(features).flatten(1))
        return output


def choosy(num_classes: int, width: int = 16) -> nn.Module:
    return Choosy(num_classes, width, Block)


@skippable(stash=["early"])
class Keep(nn.Module):
    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("early", input)
        return input


@skippable(pop=["early"])
class Add(nn.Module):
    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        early = yield pop("early")
        return input + early


def long_skip(num_classes: int, width: int = 16) -> nn.Sequential:
    """A sequence in which one layer passes a tensor straight to a later one."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2),
        Keep(),
        Block(width),
        Block(width),
        Add(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )
