"""gpipe balance: divide the layers between partitions, and print the command that trains with this balance."""

from __future__ import annotations

import shlex

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.balance.solver import sums
from gpipe_cli.build.components import balance_name, measures_layers
from gpipe_cli.build.parts import RunParts, build_parts
from gpipe_cli.build.step import make_memory, make_sample, sample_must_fit
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import BalanceConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.model_tables import print_partitions
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts


def run(settings: BalanceConfig, job: Job) -> Summary:
    with deterministic_algorithms(enabled=settings.deterministic):
        return _balance(settings, job)


def _balance(settings: BalanceConfig, job: Job) -> Summary:
    parts = build_parts(settings, job.overrides, storage=measures_layers(settings))
    parts.made.print_notes()
    balanced = parts.partitioning.balanced
    memory = _memory(settings, parts)
    layers = str(balanced.layers).replace(" ", "")
    overrides = shlex.join(["balance=manual", f"balance.layers={layers}"])
    command = f"{job.train_command(without=['balance'])} {overrides}"
    summary = {
        "balance": balanced.layers,
        "by": balance_name(settings),
        "unit": balanced.unit,
        "costs": balanced.costs,
        "sources": [times.source for times in balanced.phases] or None,
        "max": balanced.largest,
        "lower_bound": balanced.lower_bound,
        "imbalance": balanced.imbalance,
        "memory_bytes": memory,
        "train_command": command,
        "paste": command,  # its former name, for one release
        "command": job.line,
    }
    if job.shows_result:
        _print(parts, memory, summary)
    return summary


def _memory(settings: BalanceConfig, parts: RunParts) -> list[float] | None:
    """Bytes of each partition, or None if a layer depends on values and the model has none."""
    partitioning, memory = parts.partitioning, parts.partitioning.memory
    if memory is None:
        sample = make_sample(settings, parts.loader)
        with sample_must_fit(sample):
            try:
                memory = make_memory(settings, parts.model, sample, partitioning.spec)
            except ConfigError as error:
                print_status(f"memory is unknown: {error}")
                return None
    return sums(memory, partitioning.balance)


def _print(parts: RunParts, memory: list[float] | None, summary: Summary) -> None:
    balanced = parts.partitioning.balanced
    total = sum(balanced.sums) or 1.0
    rows = []
    for index, (row, cost) in enumerate(zip(parts.partitions, balanced.sums, strict=True)):
        # Layers, parameters and bytes have a column already; milliseconds need their own.
        time = {"ms": cost} if balanced.unit == "ms" else {}
        share = f"{100 * cost / total:.1f} %"
        rows.append(
            {**row, **time, "share": share, "memory": memory and format_value("bytes", int(memory[index]))}
        )
    print_partitions(rows)
    figures = {
        key: f"{summary[key]:.4g} ms"
        if balanced.unit == "ms"
        else format_value(balanced.unit.lower(), int(summary[key]))
        + (f" {balanced.unit}" if balanced.unit != "bytes" else "")
        for key in ("max", "lower_bound")
    }
    print_facts("", {**figures, "imbalance": summary["imbalance"], "train_command": summary["train_command"]})
