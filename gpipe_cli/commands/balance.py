"""gpipe balance: which layers go to which partition, and a line to paste. Writes nothing."""

from __future__ import annotations

from typing import Any

from gpipe_cli.balance.result import Balanced
from gpipe_cli.commands.assemble import assemble, balance_name
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.config.schema import Balance
from gpipe_cli.report.partitions import print_partitions
from gpipe_cli.report.tables import print_facts


def run(settings: Balance, job: Job) -> Summary:
    parts = assemble(settings, job.overrides)
    balanced = parts.split.balanced
    summary = _summary(balanced, settings, job)
    if job.shows_result:
        print_partitions(
            [{**row, **cost} for row, cost in zip(parts.partitions, _costs(balanced), strict=True)]
        )
        print_facts("", {key: summary[key] for key in ("max", "lower_bound", "imbalance", "paste")})
    return summary


def _costs(balanced: Balanced) -> list[dict[str, Any]]:
    total = sum(balanced.sums) or 1.0
    return [{balanced.unit: cost, "share": f"{100 * cost / total:.1f} %"} for cost in balanced.sums]


def _summary(balanced: Balanced, settings: Balance, job: Job) -> dict[str, Any]:
    return {
        "balance": balanced.layers,
        "by": balance_name(settings),
        "unit": balanced.unit,
        "costs": balanced.costs,
        "max": balanced.largest,
        "lower_bound": balanced.lower_bound,
        "imbalance": balanced.imbalance,
        "paste": f"balance=manual balance.layers={str(balanced.layers).replace(' ', '')}",
        "command": job.line,
    }
