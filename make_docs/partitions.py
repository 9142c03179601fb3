"""Diagrams of a model as a sequence: its layers, the partitions around them, and a skip that passes some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from markupsafe import Markup

from make_docs.svg import box, label, svg_file, tag

LAYER, GAP, HEIGHT = 78, 14, 36
MARGIN = 22
"""Between two partitions, for the arrow that crosses."""
PADDING = 12


def draw_partitions() -> str:
    """The example of the pages: five layers, balance=[2, 3]."""
    layers = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    top = 40
    elements = list(_sequence(layers, [2, 3], top, stashing=()))
    description = "five layers in two partitions, balance [2, 3]"
    return svg_file(_right([2, 3]), top + HEIGHT + 44, description, elements)


def draw_skips() -> str:
    """One skip over six layers and four partitions."""
    layers = [f"layer{number}" for number in range(1, 9)]
    balance, top = [2, 2, 2, 2], 78
    positions = _positions(balance)
    begin, end = positions[0] + LAYER / 2, positions[-1] + LAYER / 2
    elements = list(_sequence(layers, balance, top, stashing=(0, 7)))
    arc = f"M {begin:g} {top} C {begin:g} 2, {end:g} 2, {end:g} {top - 7}"
    elements.append(tag("path", {"class": "skip", "d": arc}))
    elements.append(_arrow_head("skiphead", end, top, down=True))
    elements.append(label("skip: from worker 0 straight to worker 3", (begin + end) / 2, 14, "middle"))
    description = "a skip passes the workers that do not use it"
    return svg_file(_right(balance), top + HEIGHT + 44, description, elements)


def _sequence(
    layers: Sequence[str], balance: Sequence[int], top: float, stashing: Sequence[int]
) -> Iterator[Markup]:
    positions = _positions(balance)
    firsts = [0, *accumulate(balance)]
    for index, count in enumerate(balance):
        begin, last = positions[firsts[index]], positions[firsts[index] + count - 1]
        width = last + LAYER - begin + 2 * PADDING
        yield box("partition", begin - PADDING, top - PADDING, width, HEIGHT + 2 * PADDING, radius=8)
        x = begin + width / 2 - PADDING
        yield label(f"partition {index}: worker {index}", x, top + HEIGHT + 30, "middle")
    for index, (name, x) in enumerate(zip(layers, positions, strict=True)):
        yield box("stashing" if index in stashing else "layer", x, top, LAYER, HEIGHT, name, radius=5)
        if index:
            y = top + HEIGHT / 2
            start = positions[index - 1] + LAYER
            yield tag("path", {"class": "arrow", "d": f"M {start:g} {y:g} H {x - 5:g}"})
            yield _arrow_head("head", x, y)


def _positions(balance: Sequence[int]) -> list[float]:
    """The left edge of each layer."""
    positions: list[float] = []
    x = float(PADDING + 2)
    for count in balance:
        for _ in range(count):
            positions.append(x)
            x += LAYER + GAP
        x += 2 * PADDING + MARGIN - GAP
    return positions


def _right(balance: Sequence[int]) -> float:
    return _positions(balance)[-1] + LAYER + PADDING + 2


def _arrow_head(css_class: str, x: float, y: float, *, down: bool = False) -> Markup:
    """The head of an arrow that ends at (x, y)."""
    base = (
        f"{x - 4:g} {y - 8:g}, {x + 4:g} {y - 8:g}" if down else f"{x - 7:g} {y - 4:g}, {x - 7:g} {y + 4:g}"
    )
    return tag("polygon", {"class": css_class, "points": f"{x:g} {y:g}, {base}"})
