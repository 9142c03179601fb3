"""gpipe profile timeline=true: run a few steps of the pipeline and show where their time goes.

The pipe is that of engine=threads or engine=offload, without its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from gpipe_cli.accelerator.devices import memory_snapshot, peak_bytes, reset_peaks
from gpipe_cli.balance.result import BalanceResult
from gpipe_cli.build.components import traits_of_engine
from gpipe_cli.build.optimizer import optimizer_factory
from gpipe_cli.build.parts import Partitioning, RunParts, engine_spec
from gpipe_cli.build.step import make_sample
from gpipe_cli.config.schema import ProfileConfig
from gpipe_cli.engines.offload import Slicing
from gpipe_cli.engines.parameters import OffloadedParameters
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.engines.threads import make_pipe
from gpipe_cli.offload.sizing import layer_bytes
from gpipe_cli.pipeline.microbatch import moved
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.memory import resident_memory
from gpipe_cli.profiling.records import Sample, preserved
from gpipe_cli.profiling.timeline import (
    BalanceGain,
    StepTimeline,
    compare_with_ideal,
    diagnose,
    median_step,
    recording,
    run_steps,
)
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.tables import print_facts, print_rows
from gpipe_cli.report.trace import print_step_timeline
from gpipe_cli.schedule.orders import BY_SLICE
from gpipe_cli.schedule.simulate import Simulation
from gpipe_cli.torch_internals.operation_recorder import profiler_of_all_threads

WARM_UP = 2
"""Steps before the one that is recorded."""


@final
@dataclass(frozen=True)
class Timeline:
    steps: list[StepTimeline]
    ideal: StepTimeline
    row_names: list[str]
    """One per partition."""
    summary: dict[str, Any]


def record_timeline(
    settings: ProfileConfig,
    parts: RunParts,
    sample: Sample,
    ideal: Simulation,
    activations: Sequence[int] | None,
    gain: BalanceGain | None = None,
) -> Timeline:
    """Run some steps as training would, and analyse the median one.

    `activations` are the bytes that each partition saves for backward, if they are known; `gain` is what another
    balance is worth.
    """
    assert sample.loss is not None, "a configured command has a loss"
    unit = "partition" if traits_of_engine(settings).has_partitions else "slice"
    input, target = next(parts.loader.in_order("train"))
    with _recorded_pipe(settings, parts, sample) as pipe:
        input, target = moved(input, pipe.input_device), moved(target, pipe.output_device)
        reset_peaks(pipe.devices)
        with preserved(pipe):
            steps = run_steps(
                pipe, partial(pipe.step, input, target, sample.loss, key=0), least=settings.steps
            )
        peaks = [peak_bytes(device) for device in pipe.devices]
    names = [f"{unit} {index} ({row['device']})" for index, row in enumerate(parts.partitions)]
    summary = _summary(median_step(steps), ideal, parts, activations, peaks, gain)
    return Timeline(steps, StepTimeline.simulated(ideal), names, summary)


def record_kernels(
    settings: ProfileConfig, parts: RunParts, sample: Sample, file: Path
) -> list[dict[str, Any]] | None:
    """Write the operators and kernels of a step after warm-up; return what the memory of GPUs then holds, if any."""
    assert sample.loss is not None, "a configured command has a loss"
    input, target = next(parts.loader.in_order("train"))
    with _recorded_pipe(settings, parts, sample) as pipe, preserved(pipe):
        input, target = moved(input, pipe.input_device), moved(target, pipe.output_device)
        for _ in range(WARM_UP):
            pipe.step(input, target, sample.loss, key=0)
        with profiler_of_all_threads() as profiler, recording(pipe) as recorder:
            pipe.step(input, target, sample.loss, key=0)
            recorder.spans()  # waits until the devices have run them
        profiler.export_chrome_trace(str(file))
        return memory_snapshot(pipe.devices)


def print_timeline(timeline: Timeline) -> None:
    """Print the ideal step above the measured one, to the same scale, and then the figures."""
    measured, summary = median_step(timeline.steps), timeline.summary
    longest = max(measured.seconds, timeline.ideal.seconds)
    for title, step in (("ideal", timeline.ideal), ("measured", measured)):
        bubble = format_value("bubble", step.bubble)
        caption = f"{title}: {1000 * step.seconds:.1f} ms, bubble {bubble}"
        print_step_timeline(caption, step, longest)
    rows = summary["partitions"]
    counted = any(row["device_peak_bytes"] is not None for row in rows)
    hidden = () if counted else ("estimated_bytes", "device_peak_bytes")
    columns = [column for column in rows[0] if column not in hidden]
    print_rows(
        "where the time goes",
        [column.replace("_", " ") for column in columns],
        [[format_value(column, row[column]) for column in columns] for row in rows],
        optional=("recompute", "waiting ms"),
    )
    explanation = {"note": summary["explanation"]} if summary["explanation"] else {}
    print_facts(
        "",
        {
            "bottleneck": f"partition {summary['bottleneck']}",
            **explanation,
            "to try": "; ".join(summary["advice"]),
        },
    )


def partition_times(step: StepTimeline, index: int) -> dict[str, Any]:
    """Where a partition's time went, for JSON."""
    times = step.partition(index)
    shares = {"busy": times.busy, "recompute": times.recompute, "bubble": times.bubble}
    return {"partition": index, **shares, "waiting_ms": 1000 * times.waiting}


def partition_for_timeline(settings: ProfileConfig, parts: RunParts) -> RunParts:
    """Divide the model into slices if the engine is one without partitions."""
    if traits_of_engine(settings).has_partitions:
        return parts
    balance = _slicing(settings, parts, make_sample(settings, parts.loader)).balance()
    spec = replace(
        parts.partitioning.spec,
        schedule=BY_SLICE,
        partitions=len(balance),
        checkpoint=settings.checkpoint,
        devices=1,
    )
    balanced = BalanceResult.of(balance, list(map(float, layer_bytes(parts.model))), "bytes")
    return replace(parts, partitioning=Partitioning(balanced, parts.partitioning.devices, spec))


@contextmanager
def _recorded_pipe(settings: ProfileConfig, parts: RunParts, sample: Sample) -> Iterator[Pipe]:
    spec = _engine_spec(settings, parts, sample)
    with ExitStack() as cleanup:
        pipe: Pipe
        offloaded: OffloadedParameters | None
        if traits_of_engine(settings).has_partitions:
            pipe, offloaded = make_pipe(spec, settings.engine.get("offload"))
        else:
            pipe, offloaded = _slicing(settings, parts, sample).offload(spec.balance)
        if offloaded is not None:
            cleanup.enter_context(closing(offloaded))
        pipe.least_rows = spec.least_rows
        yield cleanup.enter_context(pipe)


def _slicing(settings: ProfileConfig, parts: RunParts, sample: Sample) -> Slicing:
    options = {key: value for key, value in settings.engine.items() if key != "_target_"}
    return Slicing(_engine_spec(settings, parts, sample), **options)


def _engine_spec(settings: ProfileConfig, parts: RunParts, sample: Sample) -> EngineSpec:
    assert sample.loss is not None, "a configured command has a loss"
    make_optimizer = optimizer_factory(settings, parts.model)
    objective = TrainingObjective(sample.loss, lambda output, target: {}, make_optimizer)
    return replace(engine_spec(settings, parts, objective), make_sample=lambda: sample)


def _summary(
    step: StepTimeline,
    ideal: Simulation,
    parts: RunParts,
    activations: Sequence[int] | None,
    peaks: Sequence[int | None],
    gain: BalanceGain | None,
) -> dict[str, Any]:
    """peaks: the measured bytes of each device. The recorded steps update nothing, and neither does their estimate."""
    estimates = None
    if activations is not None:
        resident = resident_memory(parts.model, parts.partitioning.balance, optimizer=None)
        estimates = [row.total_bytes + saved for row, saved in zip(resident, activations, strict=True)]
    spec = parts.partitioning.spec
    times = [step.partition(index) for index in range(spec.partitions)]
    diagnosis = diagnose(
        times,
        spec,
        bubble=step.bubble,
        ideal_bubble=ideal.bubble,
        rows=parts.loader.batch_size,
        gain=gain,
    )
    return {
        "step_ms": 1000 * step.seconds,
        "ideal_step_ms": ideal.step,
        "bubble": step.bubble,
        "ideal_bubble": ideal.bubble,
        "partitions": [
            {
                **partition_times(step, index),
                "peak_saved_bytes": None if activations is None else activations[index],
                "estimated_bytes": None if estimates is None else estimates[index],
                "device_peak_bytes": peaks[parts.partitioning.workers[index]],
            }
            for index in range(spec.partitions)
        ],
        **asdict(diagnosis),
        "explanation": compare_with_ideal(step, StepTimeline.simulated(ideal), spec.cores),
    }
