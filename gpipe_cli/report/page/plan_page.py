"""The page of `gpipe plan`: every candidate by time and memory, the timeline of the best, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.colors import curve_class
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import ChartLine, Scale, chart_figure, draw_chart
from gpipe_cli.report.page.costs import timeline_figures
from gpipe_cli.report.page.curves import CurvePoint
from gpipe_cli.report.page.document import cards, section, whole_page
from gpipe_cli.report.page.html import Child, Html, join, table, tag
from gpipe_cli.report.page.run_facts import TimelineBar, TimelineFacts

Facts = Mapping[str, Any]
CAUSES = {
    "bubble": "waiting for the first micro-batch to arrive and the last to return",
    "slowest partition": "waiting for the slowest partition",
    "transfers": "waiting for tensors on their way between devices",
    "memory": "recomputing, or another plan than without the memory limit",
    "update": "summing gradients over replicas, and the optimizer's update",
    "host": "launching kernels from one process",
}
MIB, GIB = 2**20, 2**30
NOT_SHOWN = 0.02
"""A share of the step that a timeline may leave out without a word."""


def plan_page(summary: Facts, step: StepTimeline | None) -> str:
    """`step` is the best plan's; None if it has too many actions to draw."""
    best, candidates, curve = summary["best"], summary["candidates"], summary["memory_curve"]
    timeline = None if step is None else timeline_figures({"predicted": _timeline(step)})
    return whole_page(
        "Plan",
        [
            tag("p", {"class": "state"}, _verdict(summary)),
            _cards(best, summary),
            section("Candidates by time and memory", _chart(candidates)),
            section("A step of the best plan", timeline and join([timeline, _left_out(best, step)])),
            section("What limits it", _limits(best)),
            section("Bubble against memory", _memory_curve(curve) if curve else None),
            section("All candidates", _table(candidates)),
            section("Train with it", tag("pre", {"class": "written"}, summary["paste"])),
        ],
    )


def _verdict(summary: Facts) -> str:
    sentences = [summary["profile"], summary["advice"]]
    if too_large := summary.get("plain_bytes_too_large"):
        needed = format_value("peak_bytes", too_large)
        sentences.append(f"without a pipeline, one device would need {needed}, which does not fit")
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)


def _left_out(best: Facts, step: StepTimeline | None) -> Html | None:
    """What of the step is not in its timeline."""
    more = best["predicted_ms"] - (1000 * step.seconds if step is not None else 0.0)
    if more < NOT_SHOWN * best["predicted_ms"]:
        return None
    reason = "the optimizer's update, or waiting until one process has launched all kernels"
    return tag("p", {"class": "hint"}, f"The timeline leaves out {more:.3g} ms of the step: {reason}.")


def _cards(best: Facts, summary: Facts) -> Html:
    figures = {
        "step": f"{best['predicted_ms']:.4g} ms",
        **({"batch size": str(best["batch_size"])} if _differ(summary["candidates"]) else {}),
        "samples per second": _rate(best),
        "peak memory per device": format_value("peak_bytes", best["predicted_peak_bytes"]),
        "bubble": format_value("bubble", best["bubble"]),
        "limited by": str(best["limit"]),
        "at most shorter by": f"{100 * summary['gap']:.2f} %",
    }
    return cards(figures)


def _differ(candidates: Sequence[Facts]) -> bool:
    """Whether the batch size is part of the plans, so that only times of a sample can be compared."""
    return len({candidate["batch_size"] for candidate in candidates}) > 1


def _rate(candidate: Facts) -> str:
    rate = candidate["samples_per_second"]
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _chart(candidates: Sequence[Facts]) -> Html:
    per_sample = _differ(candidates)
    largest = max(candidate["predicted_peak_bytes"] for candidate in candidates)
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    times = [each["predicted_ms"] / (each["batch_size"] if per_sample else 1) for each in candidates]
    memories = [each["predicted_peak_bytes"] / size for each in candidates]
    across, up = Scale.over(times, margin=0.06), Scale.over(memories, margin=0.1)
    dots = [
        _dot(number, candidate, across.share(ms), up.share(memory))
        for number, (candidate, ms, memory) in enumerate(zip(candidates, times, memories, strict=True))
    ]
    caption = join(
        [
            tag("strong", None, f"{unit} on the fullest device"),
            f" by milliseconds of a {'sample' if per_sample else 'step'}; 1 is the best plan, and hollow is without a "
            "pipeline",
        ]
    )
    # The best are drawn last, above the others.
    return chart_figure(
        "time and memory",
        caption,
        reversed(dots),
        across,
        up,
        lambda tick: f"{tick:.4g} ms",
        lambda tick: f"{tick:.4g}",
    )


def _memory_curve(curve: Sequence[Facts]) -> Html:
    """The bubble of the best searched order within each memory, as a line."""
    shares, bubbles = [100 * point["share"] for point in curve], [point["bubble"] for point in curve]
    line = ChartLine(
        "bubble", 0, 0, [CurvePoint(x, x, y, y, y) for x, y in zip(shares, bubbles, strict=True)]
    )
    across = Scale.over(shares)
    caption = join(
        [
            tag("strong", None, "bubble of the best order"),
            " by the memory for activations per device, in percent of what 1f1b keeps (interleaved, where devices have "
            "several partitions)",
        ]
    )
    hover = [
        (
            round(across.share(x), 4),
            f"{x:.0f} %: {format_value('peak_bytes', point['bytes'])}\n"
            f"bubble {format_value('bubble', point['bubble'])}",
        )
        for x, point in zip(shares, curve, strict=True)
    ]
    vertical = Scale.over([0.0, *bubbles], margin=0.06)
    return draw_chart("bubble", "bubble against memory", [line], across, vertical, caption, json.dumps(hover))


def _dot(number: int, candidate: Facts, x: float, y: float) -> Html:
    place = {"x": f"{100 * x:.2f}%", "y": f"{100 * (1 - y):.2f}%"}
    plain = candidate["engine"] == "single"
    kind = f"candidate {'plain' if plain else curve_class(0 if number == 0 else 1)}"
    return tag(
        "g",
        None,
        tag("title", None, f"{number + 1}: {candidate['predicted_ms']:.4g} ms\n{candidate['paste']}"),
        tag("circle", {"class": kind, "cx": place["x"], "cy": place["y"], "r": 6 if number == 0 else 4}),
        tag("text", {**place, "dx": 9, "dy": 4}, str(number + 1)) if number == 0 or plain else None,
    )


def _table(candidates: Sequence[Facts]) -> Html:
    headings = (
        "",
        "ms",
        "samples/s",
        "memory",
        "bubble",
        "devices",
        "batch size",
        "chunks",
        "schedule",
        "checkpoint",
        "balance",
        "limit",
    )
    return table("candidates", headings, (_cells(number, each) for number, each in enumerate(candidates, 1)))


def _cells(number: int, candidate: Facts) -> Sequence[Child]:
    schedules = {"single": "no pipeline", "offload": "offload"}
    return (
        str(number),
        f"{candidate['predicted_ms']:.4g}",
        _rate(candidate),
        format_value("peak_bytes", candidate["predicted_peak_bytes"]),
        format_value("bubble", candidate["bubble"]),
        str(candidate["devices"]),
        str(candidate["batch_size"]),
        str(candidate["chunks"]),
        schedules.get(candidate["engine"], str(candidate["schedule"])),
        "by partition" if isinstance(candidate["checkpoint"], list) else str(candidate["checkpoint"]),
        str(candidate["balance"]).replace(" ", ""),
        str(candidate["limit"]),
    )


def _limits(best: Facts) -> Html:
    rows = sorted(best["limits"].items(), key=lambda item: -item[1])
    return table(
        "limits",
        ("by this much the step would be shorter without", "", "which is"),
        ((name, f"{100 * share:.1f} %", CAUSES[name]) for name, share in rows),
    )


def _timeline(step: StepTimeline) -> TimelineFacts:
    bars = tuple(
        TimelineBar(
            piece.label,
            piece.phase,
            piece.action.partition,
            piece.action.micro_batch,
            1000 * piece.begin,
            1000 * (piece.end - piece.begin),
        )
        for piece in step.pieces
    )
    return TimelineFacts(bars, step.bubble)
