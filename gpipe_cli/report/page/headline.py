"""The numbers a page begins with: what came out of a run, in few words."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.page.facts import Curve, Run
from gpipe_cli.report.page.files import number
from gpipe_cli.report.page.html import Html, tag

__all__ = ["cards", "comparison", "headline"]

NAMES = {
    "loss": "loss",
    "top1": "top-1",
    "top5": "top-5",
    "steps": "steps",
    "samples_per_second": "samples per second",
    "seconds": "time",
    "predicted_step_ms": "predicted step, ms",
    "predicted_bubble": "predicted bubble",
    "predicted_speedup": "predicted speed-up",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "forward_flops": "forward FLOPs",
    "backward_flops": "backward FLOPs",
    "saved_bytes": "kept for backward",
    "parameter_bytes": "parameters",
}
"""What is told of a summary, and how it is called; other measures of a loss follow under their own names."""
LEFT_OUT = ("epochs", "micro_batch", "parameters")


def headline(run: Run) -> dict[str, str]:
    facts = {name: value for name, value in run.summary.items() if number(value) is not None}
    known = {NAMES[name]: readable(name, facts[name]) for name in NAMES if name in facts}
    others = {
        name.replace("_", " "): readable(name, value)
        for name, value in facts.items()
        if name not in NAMES and name not in LEFT_OUT
    }
    return {**_recorded(run), **(known or _so_far(run)), **_best(run.curves), **others}


def cards(run: Run) -> Html:
    return tag(
        "dl",
        {"class": "cards"},
        *(
            tag("div", {"class": "card"}, tag("dt", None, name), tag("dd", None, value))
            for name, value in headline(run).items()
        ),
    )


def comparison(runs: Sequence[Run]) -> Html:
    """A row per run, with the colour of its curves."""
    found = [headline(run) for run in runs]
    names = list(dict.fromkeys(name for one in found for name in one))
    head = tag("tr", None, *(tag("th", None, name) for name in ("run", *names)))
    body = [
        tag("tr", None, _named(index, run), *(tag("td", None, one.get(name, "-")) for name in names))
        for index, (run, one) in enumerate(zip(runs, found, strict=True))
    ]
    table = tag("table", {"class": "runs"}, tag("thead", None, head), tag("tbody", None, *body))
    return tag("div", {"class": "scroll", "tabindex": "0"}, table)


def _named(index: int, run: Run) -> Html:
    swatch = tag(
        "svg", {"class": "dot"}, tag("rect", {"class": f"c{index % 8}", "width": "100%", "height": "100%"})
    )
    return tag("td", None, swatch, tag("a", {"href": f"#run{index}"}, str(run.path)))


def _so_far(run: Run) -> dict[str, str]:
    """Of a run that has not finished, or did not: what it measured last."""
    last = {
        f"{curve.quantity.replace('_', ' ')} ({curve.split})": readable(curve.quantity, curve.points[-1][1])
        for curve in run.curves
        if curve.quantity == "loss"
    }
    steps = [curve.points[-1][0] for curve in run.curves]
    return {**last, "steps": f"{max(steps):.0f}, not finished"} if steps else {}


def _best(curves: Sequence[Curve]) -> dict[str, str]:
    for curve in curves:
        if (curve.quantity, curve.split) == ("loss", "eval"):
            step, loss = min(curve.points, key=lambda point: point[1])
            return {"best loss": f"{readable('loss', loss)} at step {step:.0f}"}
    return {}


def _recorded(run: Run) -> dict[str, str]:
    if run.measured is None:
        return {}
    bubble = readable("bubble", run.measured.bubble)
    return {"recorded step, ms": f"{run.measured.milliseconds:.1f}", "recorded bubble": bubble}
