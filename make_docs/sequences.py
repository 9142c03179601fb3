"""Pictures of a model as a sequence: its layers, the partitions around them, and the skips that go past some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from gpipe_cli.report.page.html import Html, tag
from make_docs.svg import box, frame, label

__all__ = ["partitions", "skips"]

LAYER, GAP, HEIGHT = 78, 14, 36
ROOM = 22
"""Between two partitions, for the arrow that crosses."""
PADDING = 12


def partitions() -> str:
    """The example of the pages: five layers, balance=[2, 3]."""
    layers = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    top = 40
    parts = list(_sequence(layers, [2, 3], top, stashing=()))
    return frame(_right([2, 3]), top + HEIGHT + 44, "five layers in two partitions, balance [2, 3]", parts)


def skips() -> str:
    """One skip over six layers and four partitions."""
    layers = [f"layer{number}" for number in range(1, 9)]
    balance, top = [2, 2, 2, 2], 78
    places = _places(balance)
    begin, end = places[0] + LAYER / 2, places[-1] + LAYER / 2
    parts = list(_sequence(layers, balance, top, stashing=(0, 7)))
    arc = f"M {begin:g} {top} C {begin:g} 2, {end:g} 2, {end:g} {top - 7}"
    parts.append(tag("path", {"class": "skip", "d": arc}))
    parts.append(_head("skiphead", end, top, down=True))
    parts.append(label("skip: from worker 0 straight to worker 3", (begin + end) / 2, 14, "middle"))
    return frame(
        _right(balance), top + HEIGHT + 44, "a skip goes past the workers that have no use for it", parts
    )


def _sequence(
    layers: Sequence[str], balance: Sequence[int], top: float, stashing: Sequence[int]
) -> Iterator[Html]:
    places = _places(balance)
    firsts = [0, *accumulate(balance)]
    for index, count in enumerate(balance):
        begin, last = places[firsts[index]], places[firsts[index] + count - 1]
        width = last + LAYER - begin + 2 * PADDING
        yield box("partition", begin - PADDING, top - PADDING, width, HEIGHT + 2 * PADDING, round=8)
        yield label(
            f"partition {index}: worker {index}", begin + width / 2 - PADDING, top + HEIGHT + 30, "middle"
        )
    for index, (name, place) in enumerate(zip(layers, places, strict=True)):
        yield box("stashing" if index in stashing else "layer", place, top, LAYER, HEIGHT, name, round=5)
        if index:
            yield from _arrow(places[index - 1] + LAYER, place, top + HEIGHT / 2)


def _places(balance: Sequence[int]) -> list[float]:
    """Where each layer begins."""
    found: list[float] = []
    place = float(PADDING + 2)
    for count in balance:
        for _ in range(count):
            found.append(place)
            place += LAYER + GAP
        place += 2 * PADDING + ROOM - GAP
    return found


def _right(balance: Sequence[int]) -> float:
    return _places(balance)[-1] + LAYER + PADDING + 2


def _arrow(begin: float, end: float, y: float) -> Iterator[Html]:
    yield tag("path", {"class": "way", "d": f"M {begin:g} {y:g} H {end - 5:g}"})
    yield _head("head", end, y)


def _head(kind: str, x: float, y: float, *, down: bool = False) -> Html:
    """The tip of an arrow that ends here."""
    other = (
        f"{x - 4:g} {y - 8:g}, {x + 4:g} {y - 8:g}" if down else f"{x - 7:g} {y - 4:g}, {x - 7:g} {y + 4:g}"
    )
    return tag("polygon", {"class": kind, "points": f"{x:g} {y:g}, {other}"})
