"""Timelines of the predicted and the measured step, one row of bars per partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpipe_cli.report.colors import ACTIONS
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import Scale
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.run_facts import RunFacts, TimelineBar, TimelineFacts

ROW_HEIGHT = 26
BAR_HEIGHT = 22
AXIS_HEIGHT = 20
MIN_WIDTH = 900
MIN_BAR_WIDTH = 14
"""Pixels of the average bar: the picture scrolls if the screen is narrower than that."""
LETTER_WIDTH = 7


def step_timelines(run: RunFacts) -> Html | None:
    """None if no step was recorded."""
    if run.measured is None:
        return None
    timelines = (
        {"measured": run.measured}
        if run.ideal is None
        else {"predicted": run.ideal, "measured": run.measured}
    )
    advice = (
        tag("p", None, tag("strong", None, "Try this: "), "; ".join(run.advice), ".") if run.advice else None
    )
    return join([timeline_figures(timelines), advice])


def timeline_figures(timelines: Mapping[str, TimelineFacts]) -> Html:
    """By title, all on one scale."""
    longest = max(timeline.milliseconds for timeline in timelines.values()) or 1.0
    most_bars = max(
        max(Counter(bar.partition for bar in timeline.bars).values()) for timeline in timelines.values()
    )
    width = max(MIN_WIDTH, MIN_BAR_WIDTH * most_bars)
    figures = [_figure(title, timeline, Scale(0, longest), width) for title, timeline in timelines.items()]
    phases = {bar.phase for timeline in timelines.values() for bar in timeline.bars}
    legend = tag("p", {"class": "legend"}, *(_legend_key(phase) for phase in ACTIONS if phase in phases))
    bubble = tag(
        "p", {"class": "hint"}, "The bubble is the share of the workers' time in which they are idle."
    )
    return join([legend, *figures, bubble])


def _legend_key(phase: str) -> Html:
    swatch = tag("svg", {"class": "swatch"}, tag("rect", {"class": phase, "width": "100%", "height": 10}))
    return tag("span", {"class": "key"}, swatch, phase)


def _figure(title: str, timeline: TimelineFacts, scale: Scale, width: int) -> Html:
    """width: at least so many pixels."""
    height = ROW_HEIGHT * timeline.partitions
    bubble = "" if timeline.bubble is None else f", bubble {format_value('bubble', timeline.bubble)}"
    names = (
        tag("text", {"x": "100%", "y": ROW_HEIGHT * index + BAR_HEIGHT / 2}, str(index))
        for index in range(timeline.partitions)
    )
    area = tag(
        "svg",
        {"class": "bars", "width": width, "height": height + AXIS_HEIGHT},
        *_axis(scale, height),
        *(_bar(bar, scale, width) for bar in timeline.bars),
    )
    return tag(
        "figure",
        {"class": f"timeline {title}"},
        tag("figcaption", None, tag("strong", None, title), f" {timeline.milliseconds:.1f} ms{bubble}"),
        tag(
            "div",
            {"class": "rows"},
            tag("svg", {"class": "names", "height": height + AXIS_HEIGHT}, *names),
            tag("div", {"class": "scroll", "tabindex": "0"}, area),
        ),
    )


def _bar(bar: TimelineBar, scale: Scale, width: int) -> Html:
    tooltip = (
        f"{bar.label}: {bar.phase}\npartition {bar.partition}, micro-batch {bar.micro_batch}\n"
        f"{bar.milliseconds:.3f} ms, from {bar.begin:.3f} ms"
    )
    geometry: dict[str, str | float] = {
        "x": f"{100 * scale.share(bar.begin):.3f}%",
        "width": f"{100 * scale.share(bar.milliseconds):.3f}%",
        "y": ROW_HEIGHT * bar.partition,
        "height": BAR_HEIGHT,
    }
    has_room = width * scale.share(bar.milliseconds) > LETTER_WIDTH * len(bar.label)
    return tag(
        "svg",
        {"class": "piece", **geometry},
        tag("title", None, tooltip),
        tag(
            "rect",
            {"class": bar.phase if bar.phase in ACTIONS else "copy", "width": "100%", "height": "100%"},
        ),
        tag("text", {"x": "50%", "y": "50%"}, bar.label) if has_room else None,
    )


def _axis(scale: Scale, height: float) -> list[Html]:
    axis = []
    for tick in scale.ticks():
        x = f"{100 * scale.share(tick):.2f}%"
        axis.append(tag("line", {"class": "grid", "x1": x, "x2": x, "y2": height}))
        if tick:  # 0 needs no label
            axis.append(tag("text", {"class": "mark", "x": x, "y": height + 14}, f"{tick:.6g} ms"))
    return axis
