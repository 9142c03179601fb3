"""The part of `gpipe profile timeline=true` that runs the pipeline and says where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from gpipe_cli.config.schema import ProfileConfig
from gpipe_cli.pipeline.microbatch import moved
from gpipe_cli.profiling.action_recorder import Piece
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.timeline import StepTimeline, diagnose, median_step, record_steps
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.tables import print_facts, print_rows
from gpipe_cli.report.timeline import print_picture
from gpipe_cli.run.build import Assembly, uses_partitions
from gpipe_cli.run.recorded import recorded_pipe
from gpipe_cli.schedule.simulate import Simulation

__all__ = ["Seen", "as_step", "show_timeline", "watch"]


@final
@dataclass(frozen=True)
class Seen:
    steps: list[StepTimeline]
    ideal: StepTimeline
    names: list[str]
    """Of the rows: one per partition."""
    summary: dict[str, Any]


def watch(
    settings: ProfileConfig,
    parts: Assembly,
    sample: Sample,
    ideal: Simulation,
    activations: Sequence[int] | None,
) -> Seen:
    """Run some steps as training would, and judge the median one; `activations` are the partitions', if known."""
    assert sample.loss is not None, "a configured command has a loss"
    word = "partition" if uses_partitions(settings) else "slice"
    input, target = next(parts.feed.ordered("train"))
    with recorded_pipe(settings, parts, sample) as pipe:
        steps = record_steps(
            pipe,
            moved(input, pipe.devices[0]),
            moved(target, pipe.devices[-1]),
            sample.loss,
            settings.steps,
        )
    return Seen(
        steps,
        as_step(ideal),
        [f"{word} {index} ({row['device']})" for index, row in enumerate(parts.partitions)],
        _summary(median_step(steps), ideal, parts, activations),
    )


def show_timeline(seen: Seen) -> None:
    """The ideal above what was measured, to the same scale; then the numbers."""
    measured, summary = median_step(seen.steps), seen.summary
    longest = max(measured.seconds, seen.ideal.seconds)
    for title, step in (("ideal", seen.ideal), ("measured", measured)):
        bubble = readable("bubble", step.bubble)
        print_picture(
            f"{title}: {1000 * step.seconds:.1f} ms, bubble {bubble}", step, len(seen.names), longest
        )
    columns = list(summary["partitions"][0])
    print_rows(
        "where the time goes",
        [column.replace("_", " ") for column in columns],
        [[readable(column, row[column]) for column in columns] for row in summary["partitions"]],
        optional=("recompute", "waiting ms"),
    )
    print_facts(
        "", {"bottleneck": f"partition {summary['bottleneck']}", "to try": "; ".join(summary["advice"])}
    )


def as_step(simulation: Simulation) -> StepTimeline:
    return StepTimeline(
        tuple(
            Piece(span.action, span.phase, span.begin / 1000, span.end / 1000, span.worker)
            for span in simulation.spans
        )
    )


def _summary(
    step: StepTimeline, ideal: Simulation, parts: Assembly, activations: Sequence[int] | None
) -> dict[str, Any]:
    spec = parts.split.spec
    times = [step.partition(index) for index in range(spec.partitions)]
    found = diagnose(times, spec, bubble=step.bubble, ideal_bubble=ideal.bubble, rows=parts.feed.batch_size)
    return {
        "step_ms": 1000 * step.seconds,
        "ideal_step_ms": ideal.step,
        "bubble": step.bubble,
        "ideal_bubble": ideal.bubble,
        "partitions": [
            {
                "partition": index,
                "busy": one.busy,
                "recompute": one.recompute,
                "bubble": one.bubble,
                "waiting_ms": 1000 * one.waiting,
                "peak_saved_bytes": None if activations is None else activations[index],
            }
            for index, one in enumerate(times)
        ],
        **asdict(found),
    }
