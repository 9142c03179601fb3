"""What a page shows of a run, and how it is read from the run directory. Nothing in the files is trusted or run.

Curves are reduced while metrics.jsonl is read: a run of a million rows needs no more memory than a short one, and its
page keeps every spike.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, final

from gpipe_cli.errors import RunError
from gpipe_cli.report.page.predictions import Predictions, read_predictions, read_text_sample
from gpipe_cli.report.trace import IDEAL, MEASURED
from gpipe_cli.runs.reader import (
    RUN_FILES,
    RunReader,
    RunState,
    as_int,
    as_list,
    as_mapping,
    as_number,
    as_rows,
    as_text,
    is_run,
)
from gpipe_cli.values import lower_is_better, text_word

WINDOW_COLUMNS = ("loss_mean", "loss_min", "loss_max")
"""Columns of the training loss over the steps since the row before, drawn as one curve with the loss."""
OTHER_COLUMNS = {"step", "epoch", "split", "seconds", *WINDOW_COLUMNS}
"""Columns without a curve of their own: most say where a row stands, not what was measured."""
MAX_POINTS = 600
"""An even number: when a curve has so many, each two of them become one."""
MAX_CURVES = 200
TABLES = ("layers", "timeline", "rows", "partitions")
"""What a result contains besides its summary."""
MEMORY_PURPOSES = ("parameter", "gradient", "optimizer", "activation")
PACKAGE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
MAX_PARTITIONS = 1024
MAX_BARS = 20_000
"""A timeline of more bars would show nothing."""
VERDICTS = ("ok", "note", "problem", "skipped")
MAX_ROWS = 1000


class CurvePoint(NamedTuple):
    """One row of metrics, or the mean and the extremes of several consecutive ones."""

    first: float
    """Step of the first row."""
    last: float
    mean: float
    low: float
    high: float

    @property
    def step(self) -> float:
        """Where to draw it."""
        return (self.first + self.last) / 2


@final
@dataclass(frozen=True)
class MetricCurve:
    """One metric of one split over the steps of a run."""

    metric: str
    split: str
    points: tuple[CurvePoint, ...]
    """By step."""
    best: tuple[float, float]
    """Step and value of the best row."""


@final
class _Reduction:
    """The points of one curve while its rows are read."""

    def __init__(self, metric: str) -> None:
        self.points: list[CurvePoint] = []
        self._best: CurvePoint | None = None
        self._sign = 1 if lower_is_better(metric) else -1
        self._rows_per_point = 1
        self._rows: list[CurvePoint] = []

    def add(self, row: CurvePoint) -> None:
        if self._best is None or self._sign * row.mean < self._sign * self._best.mean:
            self._best = row
        self._rows.append(row)
        if len(self._rows) < self._rows_per_point:
            return
        self.points.append(_merge(self._rows))
        self._rows.clear()
        if len(self.points) == MAX_POINTS:
            self.points = [_merge(pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._rows_per_point *= 2

    def curve(self, metric: str, split: str) -> MetricCurve:
        assert self._best is not None, "a curve has at least one row"
        rest = [_merge(self._rows)] if self._rows else []
        best = (self._best.last, self._best.mean)
        return MetricCurve(metric, split, tuple(sorted([*self.points, *rest])), best)


def read_curves(metrics: Iterable[Mapping[str, Any]]) -> tuple[MetricCurve, ...]:
    """One per metric and split. A value that is not finite is left out of its own curve only."""
    curves: dict[tuple[str, str], _Reduction] = {}
    for row in metrics:
        step, split = as_number(row.get("step")), as_text(row.get("split"))
        if step is None:
            continue
        for metric, value in row.items():
            if metric in OTHER_COLUMNS or (number := as_number(value)) is None:
                continue
            if (metric, split) not in curves:
                if len(curves) == MAX_CURVES:
                    continue
                curves[metric, split] = _Reduction(metric)
            point = CurvePoint(step, step, number, number, number)
            curves[metric, split].add(_window(row, point) if metric == "loss" else point)
    return tuple(reduction.curve(*key) for key, reduction in curves.items())


def _window(row: Mapping[str, Any], loss: CurvePoint) -> CurvePoint:
    """The loss of all steps since the row before, or of this step alone if the row does not have them."""
    mean, low, high = (as_number(row.get(column)) for column in WINDOW_COLUMNS)
    if mean is None or low is None or high is None or not low <= high:
        return loss
    return loss._replace(mean=mean, low=low, high=high)


def _merge(points: Sequence[CurvePoint]) -> CurvePoint:
    if len(points) == 1:
        return points[0]
    return CurvePoint(
        points[0].first,
        points[-1].last,
        sum(point.mean for point in points) / len(points),
        min(point.low for point in points),
        max(point.high for point in points),
    )


@final
@dataclass(frozen=True)
class TimelineBar:
    """One action of one partition, in milliseconds since its step began."""

    label: str
    phase: str
    lane: int
    """The row of its device."""
    partition: int
    micro_batch: int
    begin: float
    milliseconds: float


@final
@dataclass(frozen=True)
class TimelineRecord:
    bars: tuple[TimelineBar, ...]
    bubble: float | None = None
    """The share of all workers' time in which they are idle."""

    @property
    def milliseconds(self) -> float:
        return max(bar.begin + bar.milliseconds for bar in self.bars)

    @property
    def lanes(self) -> list[list[int]]:
        """The partitions of each row."""
        held: dict[int, set[int]] = defaultdict(set)
        for bar in self.bars:
            held[bar.lane].add(bar.partition)
        return [sorted(held[lane]) for lane in range(1 + max(held))]


@final
@dataclass(frozen=True)
class LayerCost:
    name: str
    type: str
    partition: int
    forward: float
    backward: float
    """Milliseconds, or FLOPs if nothing was run; 0 if neither is known."""
    parameters: float
    parameter_bytes: float
    saved_bytes: float
    frozen: bool

    @property
    def cost(self) -> float:
        return self.forward + self.backward

    @property
    def bytes(self) -> float:
        return self.parameter_bytes + self.saved_bytes

    @property
    def memory(self) -> dict[str, float]:
        """Bytes by purpose."""
        saved = {"saved": self.saved_bytes} if self.saved_bytes else {}
        return {"parameter": self.parameter_bytes, **saved}


@final
@dataclass(frozen=True)
class PartitionUsage:
    device: str = ""
    layers: str = ""
    """How many, and the names of the first and the last."""
    parameters: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    """Estimated bytes by purpose."""
    device_peak: float | None = None
    """The measured bytes of everything on its device."""
    busy: float | None = None
    recompute: float | None = None
    waiting_ms: float | None = None

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@final
@dataclass(frozen=True)
class RunRecord:
    """What one run directory holds."""

    path: Path
    command: str = "train"
    """The gpipe command that made it."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    curves: tuple[MetricCurve, ...] = ()
    layers: tuple[LayerCost, ...] = ()
    unit: str = "ms"
    """The unit of the layers' costs: ms or flops."""
    recorded_step: int | None = None
    """Which step of a training the timeline shows; None for a profile, which shows one of its own steps."""
    measured: TimelineRecord | None = None
    ideal: TimelineRecord | None = None
    advice: tuple[str, ...] = ()
    partitions: tuple[PartitionUsage, ...] = ()
    device_memory: float | None = None
    """The limit in bytes that was configured."""
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """The commands that made it, in this order."""
    next_commands: Mapping[str, str] = field(default_factory=dict)
    """What you can do with the run, each purpose with its command."""
    state: RunState | None = None
    """The state of a training run; None for other runs."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """What was loaded and what is frozen."""
    predictions: Predictions | None = None
    sample: Mapping[str, str] = field(default_factory=dict)
    """What a language model wrote."""
    checks: tuple[Mapping[str, str], ...] = ()
    """The rows of a check of the machine: `name`, `verdict` (empty if gpipe knows none such), `result` and `to_do`."""
    problems: tuple[str, ...] = ()
    """What is wrong with its files."""

    @property
    def timelines(self) -> dict[str, TimelineRecord]:
        """By title; empty if no step was recorded."""
        if self.measured is None:
            return {}
        return {**({} if self.ideal is None else {"predicted": self.ideal}), "measured": self.measured}

    @property
    def memory_purposes(self) -> list[str]:
        return list(dict.fromkeys(purpose for partition in self.partitions for purpose in partition.memory))

    @property
    def resume_command(self) -> str:
        """Empty if there is none."""
        return next((line for line in self.next_commands.values() if line.startswith("gpipe train ")), "")

    @property
    def all_commands(self) -> dict[str, str]:
        """What repeats and continues the run: each purpose with its command."""
        noun = "check" if self.command == "check" else "run"
        purpose = "Repeat the run, in this order" if len(self.commands) > 1 else f"Repeat the {noun}"
        commands = {purpose: "\n".join(self.commands), **self.next_commands}
        return {purpose: lines for purpose, lines in commands.items() if lines}


def read_run(directory: Path) -> RunRecord:
    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory")
    if not is_run(directory):
        raise RunError(f"{directory}: not a run directory: it has none of {', '.join(RUN_FILES)}")
    files = RunReader(directory)
    launch, summary, profile, check = (
        files.json(f"{name}.json") for name in ("launch", "summary", "profile", "check")
    )
    result = summary or profile or check
    timeline = as_mapping(profile.get("timeline")) or files.json("timeline.json")
    events = as_rows(files.json("trace.json").get("traceEvents"))
    layers = as_rows(profile.get("layers")) or as_rows(files.json("layers.json").get("layers"))
    is_training = not profile and not check
    unit = "ms" if any("forward_ms" in row for row in layers) else "flops"
    return RunRecord(
        path=directory,
        command="train" if summary else "profile" if profile else "check" if check else "train",
        summary={key: value for key, value in result.items() if key not in TABLES},
        curves=read_curves(files.rows()),
        layers=tuple(_layer_cost(row, unit) for row in layers),
        unit=unit,
        recorded_step=as_int(timeline.get("step"), 10**15),
        measured=median_step(events, MEASURED, as_number(timeline.get("bubble"))),
        ideal=median_step(events, IDEAL, as_number(timeline.get("ideal_bubble"))),
        advice=tuple(map(as_text, as_list(timeline.get("advice")))),
        partitions=_partitions(launch, timeline, summary),
        device_memory=as_number(launch.get("device_memory")),
        config=files.text("config.yaml"),
        environment=files.json("env.json"),
        commands=_commands(launch, result),
        next_commands=_next_commands(directory, launch) if is_training else {},
        state=_state(files) if is_training else None,
        weights=_weights(launch),
        predictions=read_predictions(files.json("predictions.json")),
        sample=read_text_sample(files.json("sample.json")),
        checks=read_check_rows(check),
        problems=tuple(files.problems),
    )


def _layer_cost(row: Mapping[str, Any], unit: str) -> LayerCost:
    def number(key: str) -> float:
        return max(0.0, as_number(row.get(key)) or 0.0)

    return LayerCost(
        name=as_text(row.get("name")),
        type=as_text(row.get("type")),
        partition=as_int(row.get("partition"), MAX_PARTITIONS - 1) or 0,
        forward=number(f"forward_{unit}"),
        backward=number(f"backward_{unit}"),
        parameters=number("parameters"),
        parameter_bytes=number("parameter_bytes"),
        saved_bytes=number("saved_bytes"),
        frozen=row.get("frozen") is True,
    )


def _partitions(*sources: Mapping[str, Any]) -> tuple[PartitionUsage, ...]:
    """Devices and layers come from launch.json, time from a recorded step, peak memory from a profile or the end of a
    training."""
    rows = zip_longest(
        *(as_rows(source.get("partitions"))[:MAX_PARTITIONS] for source in sources), fillvalue={}
    )
    return tuple(_partition(place, {**measured, **summed}) for place, measured, summed in rows)


def _state(files: RunReader) -> RunState | None:
    try:
        return files.state()
    except RunError as error:
        files.problems.append(str(error))
        return None


def _weights(launch: Mapping[str, Any]) -> dict[str, str]:
    """What launch.json says was loaded and frozen."""
    facts = {"loaded": as_text(launch.get("loaded"))}
    match launch.get("frozen"):
        case str(text):
            facts["frozen"] = text
        case {"names": list(names), "elements": int(elements), "all_elements": int(all_elements)}:
            patterns = ", ".join(map(as_text, as_list(as_mapping(launch["frozen"]).get("patterns"))))
            facts["frozen"] = f"{patterns}: {len(names)} tensors, {elements:,} of {all_elements:,} parameters"
    return {name: text for name, text in facts.items() if text}


def _partition(place: Mapping[str, Any], measured: Mapping[str, Any]) -> PartitionUsage:
    first, last = as_text(place.get("first")), as_text(place.get("last"))
    count = as_number(place.get("layers"))
    memory = {purpose: as_number(place.get(f"{purpose}_bytes")) for purpose in MEMORY_PURPOSES}
    if memory["activation"] is None:
        memory["activation"] = as_number(measured.get("peak_saved_bytes"))
    return PartitionUsage(
        device=as_text(place.get("device")),
        layers="" if count is None else f"{count:.0f}: {first}" + (f" to {last}" if last != first else ""),
        parameters=as_number(place.get("parameters")),
        memory={purpose: max(0.0, size) for purpose, size in memory.items() if size is not None},
        device_peak=as_number(measured.get("device_peak_bytes")),
        busy=as_number(measured.get("busy")),
        recompute=as_number(measured.get("recompute")),
        waiting_ms=as_number(measured.get("waiting_ms")),
    )


def median_step(
    events: Sequence[Mapping[str, Any]], process: int, bubble: float | None
) -> TimelineRecord | None:
    """The step of median length among the events of a trace; None if there is none, or none that can be drawn."""
    steps: dict[int, list[TimelineBar]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("pid") == process and (bar := _bar(event)) is not None:
            steps[as_int(as_mapping(event.get("args")).get("step"), 10**9) or 0].append(bar)
    timelines = []
    for bars in steps.values():
        origin = min(bar.begin for bar in bars)
        moved = (replace(bar, begin=bar.begin - origin) for bar in bars)
        ordered = sorted(moved, key=lambda bar: (bar.lane, bar.begin))
        timelines.append(TimelineRecord(tuple(ordered), bubble))
    if not timelines:
        return None
    timelines.sort(key=lambda timeline: timeline.milliseconds)
    median = timelines[len(timelines) // 2]
    return median if len(median.bars) <= MAX_BARS else None


def _bar(event: Mapping[str, Any]) -> TimelineBar | None:
    arguments = as_mapping(event.get("args"))
    partition = as_int(arguments.get("partition"), MAX_PARTITIONS - 1)
    micro_batch = as_int(arguments.get("micro_batch"), 10**9)
    begin, duration = as_number(event.get("ts")), as_number(event.get("dur"))
    if partition is None or micro_batch is None or begin is None or duration is None or duration < 0:
        return None
    label, phase = as_text(event.get("name")), as_text(event.get("cat"))
    # Traces of earlier versions have a row for each partition.
    lane = as_int(arguments.get("lane"), MAX_PARTITIONS - 1)
    lane = partition if lane is None else lane
    return TimelineBar(label, phase, lane, partition, micro_batch, begin / 1000, duration / 1000)


def _commands(launch: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, ...]:
    lines = [as_text(line) for line in as_list(launch.get("commands"))] or [as_text(summary.get("command"))]
    return tuple(quoted for line in lines if (quoted := _requote(line)))


def _next_commands(directory: Path, launch: Mapping[str, Any]) -> dict[str, str]:
    """Made from `directory` rather than read from a file, so that they fit a run that was moved."""
    names = [name for name in as_list(launch.get("allow")) if isinstance(name, str)]
    packages = [name for name in names if PACKAGE_NAME.fullmatch(name)]
    allow = [f"allow=[{','.join(packages)}]"] if packages else []
    engine = [word for word in map(as_text, as_list(launch.get("profile"))) if word.startswith("engine=")]
    config = f"config={directory / 'config.yaml'}"
    return {
        "Resume the run; add epochs=... to train longer": shlex.join(
            ["gpipe", "train", text_word("resume", directory), *allow]
        ),
        "Evaluate it": shlex.join(["gpipe", "eval", text_word("run", directory), *allow]),
        "Export the trained weights": shlex.join(["gpipe", "export", text_word("run", directory)]),
        "See where time and memory go": shlex.join(
            ["gpipe", "profile", "timeline=true", config, *engine, *allow]
        ),
    }


def _requote(line: str) -> str:
    """A gpipe command with every word quoted, so that you can paste it safely; empty for any other line."""
    try:
        words = shlex.split(line)
    except ValueError:
        return ""
    return shlex.join(words) if words and words[0] == "gpipe" else ""


def read_check_rows(check: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    """The rows of a check.json; none if there is no such file."""
    rows = []
    for given in as_rows(check.get("rows"))[:MAX_ROWS]:
        row = {name: as_text(given.get(name)) for name in ("name", "verdict", "result", "to_do")}
        rows.append(row if row["verdict"] in VERDICTS else {**row, "verdict": ""})
    return tuple(rows)


def verdict_counts(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """How many rows have each verdict, for the verdicts that occur."""
    counted = Counter(row["verdict"] for row in rows)
    return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}
