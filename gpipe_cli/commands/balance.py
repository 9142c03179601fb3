"""gpipe balance: which layers go to which partition, and a line to paste."""

from __future__ import annotations

from typing import Any

from gpipe_cli.balance.result import Balanced
from gpipe_cli.commands.assemble import (
    balance_name,
    check_components,
    make_model,
    open_current_folder,
    split_model,
)
from gpipe_cli.commands.feed import make_feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.config.schema import Balance
from gpipe_cli.report.partitions import partition_rows, print_partitions
from gpipe_cli.report.tables import print_facts


def run(settings: Balance, job: Job) -> Summary:
    open_current_folder(settings)
    check_components(settings, job.overrides)
    feed = make_feed(settings)
    model = make_model(settings, feed.classes)
    split = split_model(settings, model, feed)
    summary = _summary(split.balanced, settings, job)
    if not job.json:
        rows = partition_rows(model, split.balance, split.devices)
        print_partitions([{**row, **costs} for row, costs in zip(rows, _costs(split.balanced), strict=True)])
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
