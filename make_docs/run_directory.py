"""The picture of a run directory: what is in it, and which commands read it."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from make_docs.svg import box, label, svg_file, tag

GROUPS = (
    (
        "the run",
        "layer",
        ("config.yaml", "snapshots/", "inference.json"),
        "gpipe train resume=, eval, predict, export",
    ),
    ("for you", "backward", ("report.html", "train.log"), "your browser, gpipe report"),
    (
        "for programs",
        "weights",
        ("metrics.jsonl", "summary.json", "timeline.json"),
        "gpipe runs, loggers, your scripts",
    ),
)
LEFT, TOP, ROW, BOX, WIDTH = 24, 44, 30, 24, 860
FILES, COMMANDS = 170, 470


def draw_run_directory() -> str:
    description = "; ".join(f"{name}: {', '.join(files)}" for name, _, files, _ in GROUPS)
    height = TOP + ROW * sum(len(files) for *_, files, _ in GROUPS) + 12 * len(GROUPS)
    return svg_file(WIDTH, height, f"A run directory. {description}", _elements(height))


def _elements(height: float) -> Iterator[Markup]:
    yield box("partition", FILES - 20, 28, 200, height - 32, radius=6)
    yield label("runs/train/resnet18/...", FILES - 20, 20, "strong")
    yield label("read by", COMMANDS, 20, "strong")
    y = float(TOP)
    for name, css_class, files, commands in GROUPS:
        middle = y + (ROW * len(files) - ROW + BOX) / 2
        yield label(name, FILES - 36, middle + 4, "end")
        yield label(commands, COMMANDS, middle + 4)
        yield tag("path", {"class": "arrow", "d": f"M {FILES + 184} {middle:g} H {COMMANDS - 12}"})
        for file in files:
            yield box(css_class, FILES - 8, y, 176, BOX, file, radius=4)
            y += ROW
        y += 12
