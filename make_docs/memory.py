"""The picture of memory per device: a bar per partition from a dry run, stacked by use, against a limit."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from markupsafe import Markup

from make_docs.svg import box, label, svg_file, tag

COMMAND = (
    "gpipe train model=hf model.path=examples/llama_7b model.init=random model.dtype=bfloat16 data.context=2048"
    " batch_size=8 chunks=8 partitions=4 balance=size schedule=1f1b optimizer=adamw --dry-run"
)
TOP = Path(__file__).parent.parent
LIMIT, GIB = 24.0, 2**30
PARTS = {
    "parameter_bytes": ("layer", "parameters"),
    "gradient_bytes": ("backward", "gradients"),
    "optimizer_bytes": ("weights", "optimizer state"),
    "activation_bytes": ("recompute", "activations"),
}
LEFT, RIGHT, ROW, BAR = 130, 86, 32, 24
WIDTH, FIRST = 860, 44


def draw_memory() -> str:
    """Run the command and draw what it prints."""
    words = [*shlex.split(COMMAND), "--json"]
    answer = subprocess.run(words, cwd=TOP, check=True, capture_output=True, text=True)
    return draw(json.loads(answer.stdout)["partitions"])


def draw(partitions: list[Mapping[str, int]]) -> str:
    whole = {part: sum(row[part] for row in partitions) for part in PARTS}
    rows = {"whole model": whole, **{f"GPU {row['partition']}": row for row in partitions}}
    scale = (WIDTH - LEFT - RIGHT) / (sum(whole.values()) / GIB)
    height = FIRST + ROW * len(rows) + 8
    description = "; ".join(f"{name}: {_total(row):.1f} GiB" for name, row in rows.items())
    return svg_file(WIDTH, height, description, _elements(rows, scale, height))


def _elements(rows: Mapping[str, Mapping[str, int]], scale: float, height: float) -> Iterator[Markup]:
    x = float(LEFT)
    for css_class, meaning in PARTS.values():
        yield box(css_class, x, 5, 11, 11, radius=2)
        yield label(meaning, x + 16, 15)
        x += 7 * len(meaning) + 40
    for index, (name, row) in enumerate(rows.items()):
        y = FIRST + ROW * index
        yield label(name, LEFT - 8, y + BAR / 2 + 4, "end")
        x = float(LEFT)
        for part, (css_class, _) in PARTS.items():
            width = scale * row[part] / GIB
            yield box(css_class, x, y, max(width - 1, 0), BAR, radius=2)
            x += width
        yield label(f"{_total(row):.1f} GiB", WIDTH - 8, y + BAR / 2 + 4, "end")
    limit = LEFT + scale * LIMIT
    yield tag("path", {"class": "skip", "d": f"M {limit:.1f} {FIRST - 8} V {height - 4:.1f}"})
    yield label(f"{LIMIT:.0f} GiB", limit, FIRST - 12, "middle")


def _total(row: Mapping[str, int]) -> float:
    return sum(row[part] for part in PARTS) / GIB
