"""Show results as tables, or as one JSON document."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims import Verdict
from benchmarks.harness import SystemResult, ratio

MEBIBYTE = 2**20


def show(console: Console, case: str, results: Sequence[SystemResult], verdicts: Sequence[Verdict]) -> None:
    console.print(_systems_table(case, results))
    if verdicts:
        console.print(_claims_table(case, verdicts))
    for result in results:
        if result.failure is not None:
            last_line = result.failure.strip().splitlines()[-1]
            console.print(f"{result.system}: not measured: {last_line}", markup=False)


def as_json(case: str, results: Sequence[SystemResult], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "case": case,
        "systems": {result.system: vars(result) for result in results},
        "claims": [vars(verdict) for verdict in verdicts],
    }


def environment() -> dict[str, Any]:
    """The software and hardware that the figures depend on."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "torchvision", "torchgpipe")},
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _systems_table(case: str, results: Sequence[SystemResult]) -> Table:
    table = Table("system", title=f"{case}: one step, medians of {len(results[0].seconds)} rounds")
    for heading in ("ms", "best", "x plain", "peak MiB", "in steps", "gradient"):
        table.add_column(heading, justify="right")
    plain = next((result for result in results if result.system == "plain" and result.seconds), None)
    for result in results:
        if result.seconds:
            table.add_row(result.system, *_cells(result, plain))
    return table


def _cells(result: SystemResult, plain: SystemResult | None) -> list[str]:
    comparison = ["-", "-"]
    if plain is not None:
        norm = (result.squared_norm / plain.squared_norm) ** 0.5 if plain.squared_norm else 1.0
        comparison = [f"{ratio(result, plain):.3f}", f"{norm:.5f}"]
    memory = [f"{number / MEBIBYTE:.0f}" for number in (result.memory, result.memory - result.memory_before)]
    times = [f"{seconds * 1e3:.2f}" for seconds in (result.median, result.best)]
    return [*times, comparison[0], *memory, comparison[1]]


def _claims_table(case: str, verdicts: Sequence[Verdict]) -> Table:
    table = Table("claim", "measured", "of bests", "bound", "possible here", "holds", title=f"{case}: claims")
    for verdict in verdicts:
        holds = "yes" if verdict.holds else "[red]no"
        possible = "" if verdict.possible is None else f"{verdict.possible:.3f}"
        table.add_row(
            verdict.text, f"{verdict.figure:.3f}", f"{verdict.best:.3f}", verdict.bound, possible, holds
        )
    return table
