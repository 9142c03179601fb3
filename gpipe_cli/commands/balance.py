"""gpipe balance: which layers go to which partition, and a line to paste. Writes nothing."""

from __future__ import annotations

import shlex
from typing import Any

from gpipe_cli.balance.result import Balanced
from gpipe_cli.balance.solver import sums
from gpipe_cli.config.schema import BalanceConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.output import say
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.build import Assembly, assemble, balance_name, make_sample, measures
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.pipeline_spec import make_memory, sample_must_fit

OWN_COLUMNS = ("ms",)
"""Units that have a column; the others are in the table already."""


def run(settings: BalanceConfig, job: Job) -> Summary:
    parts = assemble(settings, job.overrides, storage=measures(settings))
    balanced = parts.split.balanced
    memory = _memory(settings, parts)
    summary = _summary(balanced, memory, settings, job)
    if job.shows_result:
        print_partitions(
            [
                {**row, **_cells(balanced, index), "memory": memory and readable("bytes", int(memory[index]))}
                for index, row in enumerate(parts.partitions)
            ]
        )
        figures = {key: _figure(summary[key], balanced.unit) for key in ("max", "lower_bound")}
        print_facts("", {**figures, "imbalance": summary["imbalance"], "paste": summary["paste"]})
    return summary


def _memory(settings: BalanceConfig, parts: Assembly) -> list[float] | None:
    """Bytes of each partition; unknown where a layer cannot be judged without running it."""
    split, memory = parts.split, parts.split.memory
    if memory is None:
        sample = make_sample(settings, parts.feed)
        with sample_must_fit(sample):
            try:
                memory = make_memory(settings, parts.model, sample, split.spec)
            except ConfigError as error:
                say(f"memory is left out: {error}")
                return None
    return sums(memory, split.balance)


def _cells(balanced: Balanced, partition: int) -> dict[str, Any]:
    cost, total = balanced.sums[partition], sum(balanced.sums) or 1.0
    own = {balanced.unit: cost} if balanced.unit in OWN_COLUMNS else {}
    return {**own, "share": f"{100 * cost / total:.1f} %"}


def _figure(value: float, unit: str) -> str:
    return readable("bytes", int(value)) if unit == "bytes" else f"{value:.4g} {unit}"


def _summary(
    balanced: Balanced, memory: list[float] | None, settings: BalanceConfig, job: Job
) -> dict[str, Any]:
    found = shlex.join(["balance=manual", f"balance.layers={str(balanced.layers).replace(' ', '')}"])
    return {
        "balance": balanced.layers,
        "by": balance_name(settings),
        "unit": balanced.unit,
        "costs": balanced.costs,
        "max": balanced.largest,
        "lower_bound": balanced.lower_bound,
        "imbalance": balanced.imbalance,
        "memory_bytes": memory,
        "paste": f"{job.training_without(['balance'])} {found}",
        "command": job.line,
    }
