"""What layers and partitions take, as bars in tables: time and memory of every layer, memory of every partition.

A layer has the colour of its partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.page.facts import Layer, Partition, Run
from gpipe_cli.report.page.html import Child, Html, join, tag

__all__ = ["layer_table", "partition_table"]


def layer_table(run: Run) -> Html | None:
    """None where the run was not profiled."""
    if not run.layers:
        return None
    slowest = max(layer.forward + layer.backward for layer in run.layers)
    largest = max(layer.parameter_bytes + layer.saved_bytes for layer in run.layers)
    cost = "time, ms" if run.unit == "ms" else "operations"
    heads = ("layer", "name", "type", "partition", f"{cost}: forward, backward", "memory: parameters, saved")
    body = (_layer(index, layer, run.unit, slowest, largest) for index, layer in enumerate(run.layers))
    return _table("layers", heads, body)


def _layer(index: int, layer: Layer, unit: str, slowest: float, largest: float) -> Sequence[Child]:
    cost = {f"forward_{unit}": layer.forward, f"backward_{unit}": layer.backward}
    memory = {"parameter bytes": layer.parameter_bytes, "saved bytes": layer.saved_bytes}
    colour = f"p{layer.partition % 8}"
    return (
        str(index),
        layer.name,
        layer.type,
        join([_dot(colour), str(layer.partition)]),
        _bar(colour, layer.name, cost, slowest),
        _bar(colour, layer.name, memory, largest),
    )


def partition_table(run: Run) -> Html | None:
    """Balance and memory; None where nothing is known of the partitions."""
    if not run.partitions:
        return None
    limit = run.device_memory
    needed = [sum(one.memory.values()) for one in run.partitions]
    longest = max([*needed, limit or 0.0])
    heads = ["partition", "device", "layers", "parameters"]
    timed = any(one.busy is not None for one in run.partitions)
    heads += ["busy", "recompute", "waiting ms"] if timed else []
    heads += [_memory_head(run)] if longest else []
    rows = (
        [
            *_place(index, one),
            *(_times(one) if timed else ()),
            *([_memory(index, one, longest, limit)] if longest else ()),
        ]
        for index, one in enumerate(run.partitions)
    )
    return join([_shares(run.layers), _table("partitions", heads, rows)])


def _memory_head(run: Run) -> str:
    parts = dict.fromkeys(name for one in run.partitions for name in one.memory)
    limit = "" if run.device_memory is None else f"; limit {readable('bytes', run.device_memory)}"
    return f"memory, estimated: {', '.join(parts)}{limit}"


def _place(index: int, one: Partition) -> Sequence[Child]:
    dot = join([_dot(f"p{index % 8}"), str(index)])
    return (dot, one.device or "-", one.layers or "-", readable("parameters", one.parameters))


def _times(one: Partition) -> Sequence[Child]:
    return (
        readable("busy", one.busy),
        readable("recompute", one.recompute),
        readable("waiting_ms", one.waiting_ms),
    )


def _memory(index: int, one: Partition, longest: float, limit: float | None) -> Html:
    named = {f"{name} bytes": size for name, size in one.memory.items()}
    return _bar(f"p{index % 8}", f"partition {index}", named, longest, limit)


def _shares(layers: Sequence[Layer]) -> Html | None:
    """The balance: the layers one after the other, each as wide as its share of the time."""
    total = sum(layer.forward + layer.backward for layer in layers)
    if not total:
        return None
    begin, pieces = 0.0, []
    for layer in layers:
        width = 100 * (layer.forward + layer.backward) / total
        told = f"{layer.name}\npartition {layer.partition}\n{width:.2f} % of the time"
        pieces.append(_segment(f"p{layer.partition % 8}", begin, width, told))
        begin += width
    return tag("svg", {"class": "shares", "role": "img", "aria-label": "balance"}, *pieces)


def _bar(
    colour: str, name: str, parts: Mapping[str, float], longest: float, limit: float | None = None
) -> Html:
    """Its parts one after the other, ever paler, and their sum in figures."""
    begin, pieces = 0.0, []
    for index, (part, size) in enumerate(parts.items()):
        width = 100 * size / longest if longest else 0.0
        told = f"{name}\n{part.replace('_', ' ')}: {readable(part, size)}"
        pieces.append(_segment(f"{colour} part{index}", begin, width, told))
        begin += width
    if limit is not None and longest:
        at = f"{100 * limit / longest:.2f}%"
        pieces.append(tag("line", {"class": "limit", "x1": at, "x2": at, "y2": "100%"}))
    figure = readable(next(iter(parts), "bytes"), sum(parts.values()))
    return tag("span", {"class": "measure"}, tag("svg", {"class": "bar"}, *pieces), tag("span", None, figure))


def _segment(colour: str, begin: float, width: float, told: str) -> Html:
    place = {"x": f"{begin:.2f}%", "width": f"{width:.2f}%", "height": "100%"}
    return tag("rect", {"class": colour, **place}, tag("title", None, told))


def _dot(colour: str) -> Html:
    return tag("svg", {"class": "dot"}, tag("rect", {"class": colour, "width": "100%", "height": "100%"}))


def _table(kind: str, heads: Sequence[str], rows: Iterator[Sequence[Child]]) -> Html:
    head = tag("tr", None, *(tag("th", None, head) for head in heads))
    body = (tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in rows)
    table = tag("table", {"class": kind}, tag("thead", None, head), tag("tbody", None, *body))
    return tag("div", {"class": "scroll", "tabindex": "0"}, table)
