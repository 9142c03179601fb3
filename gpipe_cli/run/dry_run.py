"""gpipe train --dry-run: what a run would be. Nothing is run, nothing is written, the model has no storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.partition_memory import PartitionMemory, partition_memory
from gpipe_cli.report.layers import counted_rows, print_layers
from gpipe_cli.report.output import say
from gpipe_cli.report.partitions import print_memory, print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.build import Assembly, make_sample
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.pipeline_spec import optimizer_factory, precision_of

__all__ = ["outlook"]


def outlook(settings: TrainConfig, job: Job, parts: Assembly, steps: int) -> Summary:
    """Layers, partitions, what crosses between them, and the memory each will need."""
    facts = _facts(settings, parts)
    layers = [] if facts is None else counted_rows(facts, parts.split.balance)
    memory = [] if facts is None else _memory(settings, parts, facts)
    partitions = parts.partitions if facts is None else _with_borders(parts, facts)
    if not job.json:
        _show(layers, partitions, memory, steps)
    if memory:
        partitions = [{**row, **_bytes(one)} for row, one in zip(partitions, memory, strict=True)]
    return {"layers": layers, "partitions": partitions, "steps": steps, "command": job.line}


def _facts(settings: TrainConfig, parts: Assembly) -> ModelFacts | None:
    """None where a layer cannot be judged without running it: the rest of a dry run is worth having."""
    try:
        with precision_of(settings):
            return model_facts(parts.model, make_sample(settings, parts.feed))
    except ConfigError as error:
        say(f"shapes and memory are left out: {error}")
        return None


def _memory(settings: TrainConfig, parts: Assembly, facts: ModelFacts) -> list[PartitionMemory]:
    split = parts.split
    return partition_memory(parts.model, facts, split.balance, split.spec, optimizer_factory(settings))


def _with_borders(parts: Assembly, facts: ModelFacts) -> list[dict[str, Any]]:
    ends = pairwise([0, *accumulate(parts.split.balance)])
    borders = [facts.partition_input(begin, end) for begin, end in ends]
    return [
        {**row, "input_shapes": border.shapes, "input_bytes": border.bytes}
        for row, border in zip(parts.partitions, borders, strict=True)
    ]


def _bytes(memory: PartitionMemory) -> dict[str, int]:
    return {**asdict(memory), "total_bytes": memory.total_bytes}


def _show(
    layers: list[dict[str, Any]],
    partitions: list[dict[str, Any]],
    memory: Sequence[PartitionMemory],
    steps: int,
) -> None:
    if layers:
        print_layers(layers, sort="order", top=None)
    print_partitions(partitions)
    if memory:
        print_memory([_bytes(one) for one in memory])
    print_facts("", {"steps": steps})
