"""What torchgpipe published, line by line, as the recipes of its benchmarks list it; nothing is run or built.

A recipe names its lines in its head: a name, the figure, and the words to add to the command. The last one needs
none, it is the recipe itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, final

import yaml

from gpipe_cli.config.keys import list_options
from gpipe_cli.config.schema import TrainConfig


@final
@dataclass(frozen=True)
class Line:
    """One line of the tables in torchgpipe's docs/benchmarks.rst."""

    name: str
    figure: str
    """As it was published, with its unit."""
    words: tuple[str, ...]
    """Added to the recipe's command."""
    devices: int
    batch: int
    chunks: int
    checkpoint: str


def published_lines(recipe: str) -> list[Line]:
    text = _text(recipe)
    settings = {"checkpoint": TrainConfig.checkpoint, **yaml.safe_load(text)}
    rows = re.findall(r"^#   (\S+) +(\S+)(?:  (.+))?$", text, flags=re.MULTILINE)
    return [_line(name, figure, tuple(words.split()), settings) for name, figure, words in rows]


def model_settings(recipe: str) -> dict[str, Any]:
    """What the recipe says of its model."""
    settings: dict[str, Any] = yaml.safe_load(_text(recipe))["model"]
    return settings


def _text(recipe: str) -> str:
    path = next(option.path for option in list_options("recipes") if option.name == recipe)
    return path.read_text(encoding="utf-8")


def _line(name: str, figure: str, words: tuple[str, ...], settings: dict[str, Any]) -> Line:
    given = {**settings, **dict(word.split("=", 1) for word in words)}
    return Line(
        name,
        figure,
        words,
        devices=int(given["devices"]),
        batch=int(given["batch_size"]),
        chunks=int(given["chunks"]),
        checkpoint=given["checkpoint"],
    )
