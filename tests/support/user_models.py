"""Models as users write them, as text, and the words that train them."""

from __future__ import annotations

TINY = """
from torch import nn


def build(num_classes: int, width: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 16, num_classes),
    )


def broken(num_classes: int) -> nn.Sequential:
    class Broken(nn.Module):
        def forward(self, input):
            raise ZeroDivisionError("as \\x1b[31mwritten")

    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Broken())


def piped(num_classes: int) -> nn.Sequential:
    class Piped(nn.Module):
        def forward(self, input):
            raise BrokenPipeError(32, "Broken pipe")

    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes), Piped())
"""
HUGE = """
from torch import nn


def build(num_classes: int, width: int = 80_000) -> nn.Sequential:
    hidden = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, width), *hidden, nn.Linear(width, num_classes))
"""
TINY_RUN = (
    "model._target_=tiny_for_tests.build",
    "allow=[tiny_for_tests]",
    "data=synthetic",
    "data.shape=[3,8,8]",
    "data.length=64",
    "batch_size=20",
    "chunks=3",
)
TINY_TRAINING = (*TINY_RUN, "epochs=2", "log.every=1", "snapshot.keep=1", "snapshot.monitor=null")
