"""Time and memory: layers and partitions as tables with bars, the predicted and the measured step as timelines with a
row of bars per partition. A layer has the color of its partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpipe_cli.report.colors import ACTIONS, partition_class
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import Scale
from gpipe_cli.report.page.html import Child, Html, color_dot, join, table, tag
from gpipe_cli.report.page.run_facts import LayerCost, PartitionUsage, RunFacts, TimelineBar, TimelineFacts

ROW_HEIGHT = 26
BAR_HEIGHT = 22
AXIS_HEIGHT = 20
MIN_WIDTH = 900
MIN_BAR_WIDTH = 14
"""Pixels of the average bar: the picture scrolls if the screen is narrower than that."""
LETTER_WIDTH = 7


def layer_table(run: RunFacts) -> Html | None:
    """None if the run did not write its layers. A column that is 0 for every layer is left out."""
    if not run.layers:
        return None
    slowest = max(layer.forward + layer.backward for layer in run.layers)
    largest = max(layer.parameter_bytes + layer.saved_bytes for layer in run.layers)
    headings = ["layer", "name", "type", "partition", "parameters"]
    if slowest:
        headings.append(f"{'time in ms' if run.unit == 'ms' else 'FLOPs'}: forward, backward")
    if largest:
        saved = any(layer.saved_bytes for layer in run.layers)
        headings.append(f"memory: parameters{', saved for backward' if saved else ''}")
    rows = (_layer_row(index, layer, run.unit, slowest, largest) for index, layer in enumerate(run.layers))
    return table("layers", headings, rows)


def _layer_row(index: int, layer: LayerCost, unit: str, slowest: float, largest: float) -> Sequence[Child]:
    cost = {f"forward_{unit}": layer.forward, f"backward_{unit}": layer.backward}
    memory = {"parameter bytes": layer.parameter_bytes, "saved bytes": layer.saved_bytes}
    memory = {part: size for part, size in memory.items() if size or part == "parameter bytes"}
    color = partition_class(layer.partition)
    frozen = tag("span", {"class": "frozen"}, " frozen") if layer.frozen else None
    return (
        str(index),
        join([layer.name, frozen]),
        layer.type,
        join([color_dot(color), str(layer.partition)]),
        format_value("parameters", round(layer.parameters) or None),
        *([_bar(color, layer.name, cost, slowest)] if slowest else []),
        *([_bar(color, layer.name, memory, largest)] if largest else []),
    )


def partition_table(run: RunFacts) -> Html | None:
    """Balance, load and memory; None if nothing is known of the partitions."""
    if not run.partitions:
        return None
    limit = run.device_memory
    longest = max([*(sum(partition.memory.values()) for partition in run.partitions), limit or 0.0])
    timed = any(partition.busy is not None for partition in run.partitions)
    headings = ["partition", "device", "layers", "parameters"]
    if timed:
        headings += ["busy", "recompute", "waiting in ms"]
    if longest:
        purposes = dict.fromkeys(purpose for partition in run.partitions for purpose in partition.memory)
        bound = "" if limit is None else f"; limit {format_value('bytes', limit)}"
        # Activations are often the larger part of memory: say so where they are not in the sum.
        missing = "" if "activation" in purposes else ", without activations"
        headings.append(f"estimated memory: {', '.join(purposes)}{missing}{bound}")
    counted = any(partition.device_peak is not None for partition in run.partitions)
    if counted:
        headings.append("measured peak of the whole device")
    rows = [
        [
            *_partition_cells(index, partition, timed=timed),
            *([_memory_bar(index, partition, longest, limit)] if longest else []),
            *([format_value("bytes", partition.device_peak)] if counted else []),
        ]
        for index, partition in enumerate(run.partitions)
    ]
    return join([_balance_bar(run.layers), table("partitions", headings, rows)])


def _partition_cells(index: int, partition: PartitionUsage, *, timed: bool) -> list[Child]:
    cells: list[Child] = [
        join([color_dot(partition_class(index)), str(index)]),
        partition.device or "-",
        partition.layers or "-",
        format_value("parameters", partition.parameters),
    ]
    if timed:
        cells += [
            format_value("busy", partition.busy),
            format_value("recompute", partition.recompute),
            format_value("waiting_ms", partition.waiting_ms),
        ]
    return cells


def _memory_bar(index: int, partition: PartitionUsage, longest: float, limit: float | None) -> Html:
    sizes = {f"{purpose} bytes": size for purpose, size in partition.memory.items()}
    return _bar(partition_class(index), f"partition {index}", sizes, longest, limit)


def _balance_bar(layers: Sequence[LayerCost]) -> Html | None:
    """The layers side by side, each as wide as its share of the time."""
    total = sum(layer.forward + layer.backward for layer in layers)
    if not total:
        return None
    begin, segments = 0.0, []
    for layer in layers:
        width = 100 * (layer.forward + layer.backward) / total
        tooltip = f"{layer.name}\npartition {layer.partition}\n{width:.2f} % of the time"
        segments.append(_segment(partition_class(layer.partition), begin, width, tooltip))
        begin += width
    return tag("svg", {"class": "shares", "role": "img", "aria-label": "balance"}, *segments)


def _bar(
    color: str, name: str, parts: Mapping[str, float], longest: float, limit: float | None = None
) -> Html:
    """The parts side by side, each paler than the last, and their sum as a number."""
    begin, segments = 0.0, []
    for index, (part, size) in enumerate(parts.items()):
        width = 100 * size / longest if longest else 0.0
        tooltip = f"{name}\n{part.replace('_', ' ')}: {format_value(part, size)}"
        segments.append(_segment(f"{color} part{index}", begin, width, tooltip))
        begin += width
    if limit is not None and longest:
        x = f"{100 * limit / longest:.2f}%"
        segments.append(tag("line", {"class": "limit", "x1": x, "x2": x, "y2": "100%"}))
    sum_of_parts = sum(parts.values())
    total = format_value(next(iter(parts), "bytes"), sum_of_parts) if sum_of_parts else "-"
    return tag(
        "span", {"class": "measure"}, tag("svg", {"class": "bar"}, *segments), tag("span", None, total)
    )


def _segment(color: str, begin: float, width: float, tooltip: str) -> Html:
    geometry = {"x": f"{begin:.2f}%", "width": f"{width:.2f}%", "height": "100%"}
    return tag("rect", {"class": color, **geometry}, tag("title", None, tooltip))


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
        *(_timeline_bar(bar, scale, width) for bar in timeline.bars),
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


def _timeline_bar(bar: TimelineBar, scale: Scale, width: int) -> Html:
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
