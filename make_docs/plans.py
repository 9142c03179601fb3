"""The picture of a plan: its candidates by step time and by memory of the fullest device."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from make_docs.svg import label, svg_file, tag

COMMAND = (
    "gpipe plan model=gpt model.width=2048 model.depth=24 data.context=1024 batch_size=32 precision=fp16"
    " device=a100 devices=4 device_memory=40GiB plan.budget=200"
)
LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT = 64, 24, 28, 46, 860, 330
GIB, LIMIT, LAST = 2**30, 40.0, 1600.0
LIST, FIRST, LINE = 400, 120, 20


def draw_plan() -> str:
    """Run the command and draw what it prints."""
    answer = subprocess.run([*shlex.split(COMMAND), "--json"], check=True, capture_output=True, text=True)
    return draw(json.loads(answer.stdout)["candidates"])


def draw(candidates: Sequence[Mapping[str, Any]]) -> str:
    description = "Candidates: " + "; ".join(
        f"{_name(each)}, {each['predicted_peak_bytes'] / GIB:.1f} GiB" for each in candidates
    )
    return svg_file(WIDTH, HEIGHT, description, _elements(candidates))


def _elements(candidates: Sequence[Mapping[str, Any]]) -> Iterator[Markup]:
    bottom = HEIGHT - BOTTOM
    yield tag("path", {"class": "arrow", "d": f"M {LEFT} {TOP} V {bottom} H {WIDTH - RIGHT}"})
    yield label("GiB on the fullest device", LEFT + 8, TOP - 8)
    yield label("milliseconds per step", WIDTH - RIGHT, HEIGHT - 6, "end")
    for gib in (10, 20, 30, 40):
        yield label(str(gib), LEFT - 8, _y(gib) + 4, "end")
    for ms in (400, 800, 1200, 1600):
        yield label(str(ms), _x(ms), bottom + 18, "middle")
    yield tag("path", {"class": "skip", "d": f"M {LEFT} {_y(LIMIT):.1f} H {WIDTH - RIGHT}"})
    yield label("device_memory=40GiB", WIDTH - RIGHT, _y(LIMIT) + 16, "end")
    yield from _numbered(candidates)


def _numbered(candidates: Sequence[Mapping[str, Any]]) -> Iterator[Markup]:
    """A dot for each candidate, and a list of what the numbers stand for."""
    for number, each in enumerate(candidates, 1):
        x, y = _x(each["predicted_ms"]), _y(each["predicted_peak_bytes"] / GIB)
        kind = "forward" if number == 1 else "idle partition" if each["engine"] == "single" else "weights"
        yield tag(
            "circle", {"class": kind, "cx": round(x, 1), "cy": round(y, 1), "r": 7 if number == 1 else 5}
        )
        # The neighbors of the best have their numbers on the other side.
        yield label(
            str(number),
            x + 11 if number != 1 else x - 11,
            round(y + 4, 1),
            "" if number != 1 else "end strong",
        )
        yield label(f"{number}  {_name(each)}", LIST, FIRST + LINE * number, "strong" if number == 1 else "")


def _name(candidate: Mapping[str, Any]) -> str:
    if candidate["engine"] == "single":
        return f"without a pipeline: {candidate['predicted_ms']:.0f} ms"
    partitions = len(candidate["balance"])
    plan = f"schedule={candidate['schedule']}, {partitions} partitions, chunks={candidate['chunks']}"
    return f"{plan}: {candidate['predicted_ms']:.0f} ms"


def _x(ms: float) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * ms / LAST


def _y(gib: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * gib / (LIMIT * 1.05)
