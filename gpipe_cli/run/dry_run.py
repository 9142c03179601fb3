"""gpipe train --dry-run: print layers, partitions and estimated memory of a run without running or writing anything."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.partition_memory import partition_memory
from gpipe_cli.report.model_tables import flop_rows, print_layers, print_partition_memory, print_partitions
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.build import RunParts
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.training_step import autocast_of, make_sample, optimizer_factory


def dry_run(settings: TrainConfig, job: Job, parts: RunParts, steps: int) -> Summary:
    layers: list[dict[str, Any]] = []
    memory: list[dict[str, int]] = []
    partitions = parts.partitions
    facts = _facts(settings, parts)
    if facts is not None:
        balance = parts.partitioning.balance
        layers = flop_rows(facts, balance)
        boundaries = [facts.partition_input(begin, end) for begin, end in pairwise([0, *accumulate(balance)])]
        partitions = [
            {**row, "input_shapes": boundary.shapes, "input_bytes": boundary.bytes}
            for row, boundary in zip(partitions, boundaries, strict=True)
        ]
        estimates = partition_memory(
            parts.model, facts, balance, parts.partitioning.spec, optimizer_factory(settings)
        )
        memory = [{**asdict(estimate), "total_bytes": estimate.total_bytes} for estimate in estimates]
    if not job.json:
        if layers:
            print_layers(layers, sort="order", top=None)
        print_partitions(partitions)
        if memory:
            print_partition_memory(memory)
        print_facts("", {"steps": steps})
    if memory:
        partitions = [{**row, **sizes} for row, sizes in zip(partitions, memory, strict=True)]
    return {"layers": layers, "partitions": partitions, "steps": steps, "command": job.line}


def _facts(settings: TrainConfig, parts: RunParts) -> ModelFacts | None:
    """Shapes and sizes of every layer, or None if a layer depends on values and the model has none."""
    try:
        with autocast_of(settings):
            return model_facts(parts.model, make_sample(settings, parts.loader))
    except ConfigError as error:
        print_status(f"shapes and memory are unknown: {error}")
        return None
