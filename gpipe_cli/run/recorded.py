"""The pipe whose steps a profile records: that of engine=threads or of engine=offload, without its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_cli.balance.result import Balanced
from gpipe_cli.config.schema import ProfileConfig
from gpipe_cli.engines.offload import Slicing
from gpipe_cli.engines.protocol import Objective
from gpipe_cli.engines.threads import take_away
from gpipe_cli.offload.sizing import border_bytes, layer_bytes
from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.run.build import Assembly, Split, make_sample, uses_partitions
from gpipe_cli.run.pipeline_spec import optimizer_factory
from gpipe_cli.schedule.by_slice import TRAITS as BY_SLICE

__all__ = ["recorded_pipe", "with_slices"]


def with_slices(settings: ProfileConfig, parts: Assembly) -> Assembly:
    """The same parts, cut as engine=offload would; as they are for an engine with partitions."""
    if uses_partitions(settings):
        return parts
    balance = _slicing(settings, parts, make_sample(settings, parts.feed)).balance()
    spec = replace(
        parts.split.spec,
        schedule=BY_SLICE.name,
        partitions=len(balance),
        checkpoint=settings.checkpoint,
        devices=1,
    )
    balanced = Balanced.of(balance, list(map(float, layer_bytes(parts.model))), "bytes")
    return replace(parts, split=Split(balanced, parts.split.devices, spec))


@contextmanager
def recorded_pipe(settings: ProfileConfig, parts: Assembly, sample: Sample) -> Iterator[WorkedSequence]:
    split, scratch = parts.split, Path(settings.run_dir or "runs")
    with ExitStack() as held:
        if not uses_partitions(settings):
            slicing = _slicing(settings, parts, sample)
            pipe, away = slicing.apart(split.balance, split.devices[0], scratch)
            held.enter_context(closing(away))
            yield held.enter_context(pipe)
            return
        residences: Any = ()
        offload = settings.engine.get("offload")
        if offload is not None:
            recomputed = split.spec.checkpoint_stops
            borders = partial(border_bytes, parts.model, split.balance, recomputed, lambda: sample)
            away = take_away(
                parts.model, _task(settings, sample), split.balance, split.devices, offload, scratch, borders
            )
            residences = held.enter_context(closing(away)).rotations
        yield held.enter_context(
            GPipe(
                parts.model,
                split.balance,
                devices=split.devices,
                chunks=settings.chunks,
                checkpoint=split.spec.checkpoint,
                schedule=settings.schedule.name,
                residences=residences,
            )
        )


def _slicing(settings: ProfileConfig, parts: Assembly, sample: Sample) -> Slicing:
    given = {key: value for key, value in settings.engine.items() if key != "_target_"}
    task = _task(settings, sample)
    return Slicing(parts.model, task, settings.chunks, settings.checkpoint, lambda: sample, **given)


def _task(settings: ProfileConfig, sample: Sample) -> Objective:
    assert sample.loss is not None, "a configured command has a loss"
    return Objective(sample.loss, lambda output, target: {}, optimizer_factory(settings))
