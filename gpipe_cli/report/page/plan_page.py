"""The page of `gpipe plan`: every candidate by time and memory, the timeline of the best, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from gpipe_cli.profiling.timeline import StepTimeline
from gpipe_cli.report.colors import curve_class
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import ChartLine, Scale, chart_figure, draw_chart, shape
from gpipe_cli.report.page.render import TimelineDrawing, render
from gpipe_cli.report.page.run_record import CurvePoint, median_step
from gpipe_cli.report.trace import IDEAL, trace_events

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
    left_out_ms = best["predicted_ms"] - (1000 * step.seconds if step is not None else 0.0)
    events = [] if step is None else trace_events([step], (), IDEAL)
    timeline = None if step is None else median_step(events, IDEAL, step.bubble)
    return render(
        "plan.html",
        "Plan",
        verdict=_verdict(summary),
        figures=_figures(best, summary),
        chart=_chart(candidates),
        timeline=None if timeline is None else TimelineDrawing({"predicted": timeline}),
        left_out_ms=left_out_ms if left_out_ms >= NOT_SHOWN * best["predicted_ms"] else None,
        best=best,
        causes=CAUSES,
        memory_curve=_memory_curve(curve) if curve else None,
        candidates=candidates,
        rates=[_rate(each) for each in candidates],
        is_verified=any("measured_ms" in each for each in candidates),
        train_command=summary["train_command"],
    )


def _verdict(summary: Facts) -> str:
    sentences = [summary["profile"], summary["advice"]]
    if too_large := summary.get("plain_bytes_too_large"):
        needed = format_value("peak_bytes", too_large)
        sentences.append(f"without a pipeline, one device would need at least {needed}, which does not fit")
    return " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)


def _figures(best: Facts, summary: Facts) -> dict[str, str]:
    return {
        "step": f"{best['predicted_ms']:.4g} ms",
        **({"step, measured": f"{best['measured_ms']:.4g} ms"} if "measured_ms" in best else {}),
        **({"batch size": str(best["batch_size"])} if _differ(summary["candidates"]) else {}),
        "samples per second": _rate(best),
        "peak memory per device": format_value("peak_bytes", best["predicted_peak_bytes"]),
        "bubble": format_value("bubble", best["bubble"]),
        "limited by": str(best["limit"]),
        "room for improvement": f"{100 * summary['gap']:.2f} %",
    }


def _differ(candidates: Sequence[Facts]) -> bool:
    """Whether the batch size is part of the plans, so that only times of a sample can be compared."""
    return len({candidate["batch_size"] for candidate in candidates}) > 1


def _ms(candidate: Facts) -> float:
    """As measured, or else as predicted."""
    return float(candidate.get("measured_ms", candidate["predicted_ms"]))


def _rate(candidate: Facts) -> str:
    rate = candidate["samples_per_second"]
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _chart(candidates: Sequence[Facts]) -> Markup:
    per_sample = _differ(candidates)
    largest = max(candidate["predicted_peak_bytes"] for candidate in candidates)
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    times = [_ms(each) / (each["batch_size"] if per_sample else 1) for each in candidates]
    memories = [each["predicted_peak_bytes"] / size for each in candidates]
    across, up = Scale.over(times, margin=0.06), Scale.over(memories, margin=0.1)
    dots = [
        _dot(number, candidate, across.share(ms), up.share(memory))
        for number, (candidate, ms, memory) in enumerate(zip(candidates, times, memories, strict=True))
    ]
    caption = shape(
        "<strong>{unit} on the fullest device</strong> by milliseconds of a {what}; 1 is the best plan, and hollow is "
        "without a pipeline",
        unit=unit,
        what="sample" if per_sample else "step",
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


def _dot(number: int, candidate: Facts, x: float, y: float) -> Markup:
    is_best, is_plain = number == 0, candidate["engine"] == "single"
    text = '<text x="{x}%" y="{y}%" dx="9" dy="4">{number}</text>' if is_best or is_plain else ""
    return shape(
        f'<g><title>{{title}}</title><circle class="candidate {{kind}}" cx="{{x}}%" cy="{{y}}%" r="{{r}}"/>{text}</g>',
        title=f"{number + 1}: {_ms(candidate):.4g} ms\n{candidate['overrides']}",
        kind="plain" if is_plain else curve_class(0 if is_best else 1),
        x=100 * x,
        y=100 * (1 - y),
        r=6 if is_best else 4,
        number=number + 1,
    )


def _memory_curve(curve: Sequence[Facts]) -> Markup:
    """The bubble of the best searched order within each memory, as a line."""
    shares, bubbles = [100 * point["share"] for point in curve], [point["bubble"] for point in curve]
    line = ChartLine(
        "bubble", 0, 0, [CurvePoint(x, x, y, y, y) for x, y in zip(shares, bubbles, strict=True)]
    )
    across = Scale.over(shares)
    caption = Markup(
        "<strong>bubble of the best order</strong> by the memory for activations per device, in percent of what 1f1b "
        "keeps (interleaved, where devices have several partitions)"
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
