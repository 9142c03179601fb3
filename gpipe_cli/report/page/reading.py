"""A run directory as the facts of a page. Only files are read; nothing in them is run or believed.

Decides which file tells what. A directory that holds none of them is an error; a damaged file is a note.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import RunError
from gpipe_cli.report.page.facts import Curve, Layer, Partition, Run
from gpipe_cli.report.page.files import Files, mapping, number, rows, text, whole
from gpipe_cli.report.page.traces import MOST_PARTITIONS, timeline
from gpipe_cli.report.trace import IDEAL, MEASURED

__all__ = ["read_run"]

MADE_BY_RUNS = ("launch.json", "config.yaml", "metrics.jsonl", "profile.json", "summary.json")
"""A directory with none of these is no run."""
PLACE = ("step", "epoch", "seconds")
"""Numbers of a row of metrics that say where it stands, not what was measured."""
MEMORY = ("parameter", "gradient", "optimizer", "activation")
PACKAGE = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def read_run(directory: Path) -> Run:
    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory")
    if not any(os.path.lexists(directory / name) for name in MADE_BY_RUNS):
        raise RunError(f"{directory}: is no run directory, it has none of {', '.join(MADE_BY_RUNS)}")
    files = Files(directory)
    launch, summary, profile = (files.json(f"{name}.json") for name in ("launch", "summary", "profile"))
    seen = mapping(profile.get("timeline"))
    trace = files.json("trace.json")
    layers, unit = _layers(profile)
    return Run(
        path=directory,
        command="profile" if profile and not summary else "train",
        summary=summary
        or {key: value for key, value in profile.items() if key not in ("layers", "timeline")},
        curves=_curves(files.json_lines("metrics.jsonl")),
        layers=layers,
        unit=unit,
        measured=timeline(trace, MEASURED, number(seen.get("bubble"))),
        ideal=timeline(trace, IDEAL, number(seen.get("ideal_bubble"))),
        advice=tuple(map(text, _list(seen.get("advice")))),
        partitions=_partitions(launch, seen),
        device_memory=number(launch.get("device_memory")),
        config=files.text("config.yaml"),
        environment=files.json("env.json"),
        commands=_commands(launch, summary or profile),
        next_commands=_next(directory, launch, is_profile=bool(profile)),
        notes=tuple(files.notes),
    )


def _curves(metrics: Iterable[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """By quantity, then by split; a row that is not finite leaves a gap in no other."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in metrics:
        step, split = number(row.get("step")), text(row.get("split"))
        for quantity, value in row.items():
            found = number(value)
            if step is not None and found is not None and quantity not in PLACE:
                points[quantity, split].append((step, found))
    return tuple(Curve(*key, tuple(sorted(found))) for key, found in points.items())


def _layers(profile: Mapping[str, Any]) -> tuple[tuple[Layer, ...], str]:
    found = rows(profile.get("layers"))
    unit = "ms" if any("forward_ms" in row for row in found) else "flops"
    return tuple(_layer(row, unit) for row in found), unit


def _layer(row: Mapping[str, Any], unit: str) -> Layer:
    forward, backward, parameters, saved = (
        max(0.0, number(row.get(key)) or 0.0)
        for key in (f"forward_{unit}", f"backward_{unit}", "parameter_bytes", "saved_bytes")
    )
    partition = whole(row.get("partition"), MOST_PARTITIONS - 1) or 0
    return Layer(
        text(row.get("name")), text(row.get("type")), partition, forward, backward, parameters, saved
    )


def _partitions(launch: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[Partition, ...]:
    """Where they are comes from the launch, how busy they were from the recorded steps."""
    placed, busy = (rows(one.get("partitions"))[:MOST_PARTITIONS] for one in (launch, seen))
    count = max(len(placed), len(busy))
    both = zip(placed + [{}] * (count - len(placed)), busy + [{}] * (count - len(busy)), strict=True)
    return tuple(_partition(place, time) for place, time in both)


def _partition(place: Mapping[str, Any], time: Mapping[str, Any]) -> Partition:
    first, last = text(place.get("first")), text(place.get("last"))
    count = number(place.get("layers"))
    memory = {name: number(place.get(f"{name}_bytes")) for name in MEMORY}
    if memory["activation"] is None:
        memory["activation"] = number(time.get("peak_saved_bytes"))
    return Partition(
        device=text(place.get("device")),
        layers="" if count is None else f"{count:.0f}: {first}" + (f" to {last}" if last != first else ""),
        parameters=number(place.get("parameters")),
        memory={name: max(0.0, size) for name, size in memory.items() if size is not None},
        busy=number(time.get("busy")),
        recompute=number(time.get("recompute")),
        waiting_ms=number(time.get("waiting_ms")),
    )


def _commands(launch: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ...]:
    told = [text(one) for one in _list(launch.get("commands"))] or [text(summary.get("command"))]
    return tuple(line for one in told if (line := _requoted(one)))


def _next(directory: Path, launch: Mapping[str, Any], *, is_profile: bool) -> dict[str, str]:
    """Made here where possible, so that they fit a directory that was moved."""
    if is_profile:
        return {}
    packages = [one for one in _list(launch.get("allow")) if isinstance(one, str) and PACKAGE.fullmatch(one)]
    allow = [f"allow=[{','.join(packages)}]"] if packages else []
    profile = _requoted(text(launch.get("profile")))
    return {
        "go on, or train longer with epochs=...": shlex.join(
            ["gpipe", "train", f"resume={directory}", *allow]
        ),
        "evaluate": shlex.join(["gpipe", "eval", f"run={directory}", *allow]),
        "export the weights": shlex.join(["gpipe", "export", f"run={directory}"]),
        **({"see where time and memory go": profile} if profile else {}),
    }


def _requoted(line: str) -> str:
    """A line of gpipe's as a shell would read it, every word quoted: nothing else can hide in it."""
    try:
        words = shlex.split(line)
    except ValueError:
        return ""
    return shlex.join(words) if words and words[0] == "gpipe" else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
