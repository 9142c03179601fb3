"""Pictures of a model as a sequence: its layers, its partitions, and a skip connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from gpipe_cli.report.page.html import Html, tag
from make_docs.svg import box, frame, label

LAYER, GAP, HEIGHT = 78, 14, 36
ARROW_GAP = 22
"""Between two partitions, for the arrow."""
PADDING = 12


def partitions() -> str:
    """The example of the docs: five layers, balance=[2, 3]."""
    layers = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    top = 40
    parts = list(_sequence(layers, [2, 3], top, stashing=()))
    return frame(_width([2, 3]), top + HEIGHT + 44, "five layers in two partitions, balance [2, 3]", parts)


def skips() -> str:
    """One skip over six layers and four partitions."""
    layers = [f"layer{number}" for number in range(1, 9)]
    balance, top = [2, 2, 2, 2], 78
    positions = _layer_positions(balance)
    begin, end = positions[0] + LAYER / 2, positions[-1] + LAYER / 2
    parts = list(_sequence(layers, balance, top, stashing=(0, 7)))
    arc = f"M {begin:g} {top} C {begin:g} 2, {end:g} 2, {end:g} {top - 7}"
    parts.append(tag("path", {"class": "skip", "d": arc}))
    parts.append(_arrow_head("skiphead", end, top, down=True))
    parts.append(label("skip: from worker 0 straight to worker 3", (begin + end) / 2, 14, "middle"))
    return frame(
        _width(balance), top + HEIGHT + 44, "a skip connection passes the workers that do not use it", parts
    )


def _sequence(
    layers: Sequence[str], balance: Sequence[int], top: float, stashing: Sequence[int]
) -> Iterator[Html]:
    positions = _layer_positions(balance)
    firsts = [0, *accumulate(balance)]
    for index, count in enumerate(balance):
        begin, last = positions[firsts[index]], positions[firsts[index] + count - 1]
        width = last + LAYER - begin + 2 * PADDING
        yield box("partition", begin - PADDING, top - PADDING, width, HEIGHT + 2 * PADDING, round=8)
        yield label(
            f"partition {index}: worker {index}", begin + width / 2 - PADDING, top + HEIGHT + 30, "middle"
        )
    for index, (name, position) in enumerate(zip(layers, positions, strict=True)):
        yield box("stashing" if index in stashing else "layer", position, top, LAYER, HEIGHT, name, round=5)
        if index:
            yield from _arrow(positions[index - 1] + LAYER, position, top + HEIGHT / 2)


def _layer_positions(balance: Sequence[int]) -> list[float]:
    """The x of each layer."""
    positions: list[float] = []
    position = float(PADDING + 2)
    for count in balance:
        for _ in range(count):
            positions.append(position)
            position += LAYER + GAP
        position += 2 * PADDING + ARROW_GAP - GAP
    return positions


def _width(balance: Sequence[int]) -> float:
    return _layer_positions(balance)[-1] + LAYER + PADDING + 2


def _arrow(begin: float, end: float, y: float) -> Iterator[Html]:
    yield tag("path", {"class": "arrow", "d": f"M {begin:g} {y:g} H {end - 5:g}"})
    yield _arrow_head("head", end, y)


def _arrow_head(kind: str, x: float, y: float, *, down: bool = False) -> Html:
    """The tip of an arrow that ends at (x, y)."""
    other = (
        f"{x - 4:g} {y - 8:g}, {x + 4:g} {y - 8:g}" if down else f"{x - 7:g} {y - 4:g}, {x - 7:g} {y + 4:g}"
    )
    return tag("polygon", {"class": kind, "points": f"{x:g} {y:g}, {other}"})
