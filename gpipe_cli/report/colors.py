"""The colors of actions, partitions and curves, for terminals and pages.

No two of actions and partitions look alike: where both are shown, a color must have one meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Color(NamedTuple):
    light: str
    """On a white page."""
    dark: str
    """On a black page."""
    terminal: str
    """A name of rich."""


ACTIONS: Mapping[str, Color] = {
    "forward": Color("#3b7dd8", "#4f8fe6", "blue"),
    "recompute": Color("#d99a1c", "#d6a239", "yellow"),
    "backward": Color("#2f9e5b", "#40a868", "green"),
    "copy": Color("#9aa4af", "#67727e", "bright_black"),
    "load": Color("#6b7683", "#8d98a4", "magenta"),
    "drop": Color("#6b7683", "#8d98a4", "magenta"),
}
"""By phase of a recorded step; loading and dropping a slice move memory, as a copy does."""
PARTITIONS = (
    Color("#7a5ce0", "#9d87f0", "medium_purple1"),
    Color("#d14b5c", "#ea7583", "indian_red1"),
    Color("#128a94", "#3fb9c2", "dark_turquoise"),
    Color("#b5459b", "#d277bd", "orchid"),
    Color("#8a6446", "#c39a78", "tan"),
    Color("#4a4f9e", "#8088dd", "slate_blue1"),
    Color("#c0562b", "#e58a5e", "light_salmon3"),
    Color("#5f6f8f", "#9aaac9", "light_steel_blue"),
)
"""Further partitions begin again with the first."""
CURVES = (
    Color("#0b62c4", "#6aaaff", "blue"),
    Color("#e07b1a", "#ee9447", "yellow"),
    Color("#2f9e5b", "#4cb676", "green"),
    Color("#b5459b", "#d277bd", "magenta"),
    Color("#7a5ce0", "#9d87f0", "bright_blue"),
    Color("#1b9aa3", "#3fb9c2", "cyan"),
    Color("#b6862c", "#cfa350", "bright_yellow"),
    Color("#d14b5c", "#ea7583", "red"),
)
"""The first two are training and evaluation; with several runs, each has one."""


def partition_class(partition: int) -> str:
    """The CSS class of what belongs to a partition."""
    return f"p{partition % len(PARTITIONS)}"


def curve_class(curve: int) -> str:
    """The CSS class of a curve, and of what marks it."""
    return f"c{curve % len(CURVES)}"


def color_style() -> str:
    """The style sheet of these classes, and of a class for each phase."""
    colors = {
        **ACTIONS,
        **{partition_class(index): color for index, color in enumerate(PARTITIONS)},
        **{curve_class(index): color for index, color in enumerate(CURVES)},
    }
    light = " ".join(f"--{name}: {color.light};" for name, color in colors.items())
    dark = " ".join(f"--{name}: {color.dark};" for name, color in colors.items())
    fills = "\n".join(f".{name} {{ fill: var(--{name}); }}" for name in colors)
    strokes = "\n".join(f".line.{name} {{ stroke: var(--{name}); }}" for name in colors)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{fills}\n{strokes}\n"
