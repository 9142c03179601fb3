"""Shows what was measured: tables for people, one JSON document for machines. Computes nothing but ratios."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims import Judged
from benchmarks.harness import Measured, ratio

MEBIBYTE = 2**20


def show(console: Console, case: str, results: Sequence[Measured], judged: Sequence[Judged]) -> None:
    console.print(_systems_table(case, results))
    if judged:
        console.print(_claims_table(case, judged))
    for measured in results:
        if measured.failure is not None:
            last_line = measured.failure.strip().splitlines()[-1]
            console.print(f"{measured.system}: not measured: {last_line}", markup=False)


def as_json(case: str, results: Sequence[Measured], judged: Sequence[Judged]) -> dict[str, Any]:
    return {
        "case": case,
        "systems": {measured.system: vars(measured) for measured in results},
        "claims": [vars(one) for one in judged],
    }


def environment() -> dict[str, Any]:
    """What figures depend on, so that they are never read without it."""
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


def _systems_table(case: str, results: Sequence[Measured]) -> Table:
    table = Table("system", title=f"{case}: one step, medians of {len(results[0].seconds)} rounds")
    for heading in ("ms", "best", "x plain", "peak MiB", "in steps", "gradient"):
        table.add_column(heading, justify="right")
    plain = next((one for one in results if one.system == "plain" and one.seconds), None)
    for measured in results:
        if measured.seconds:
            table.add_row(measured.system, *_cells(measured, plain))
    return table


def _cells(measured: Measured, plain: Measured | None) -> list[str]:
    comparison = ["-", "-"]
    if plain is not None:
        norm = (measured.squared_norm / plain.squared_norm) ** 0.5 if plain.squared_norm else 1.0
        comparison = [f"{ratio(measured, plain):.3f}", f"{norm:.5f}"]
    memory = [
        f"{number / MEBIBYTE:.0f}" for number in (measured.memory, measured.memory - measured.memory_before)
    ]
    times = [f"{seconds * 1e3:.2f}" for seconds in (measured.median, measured.best)]
    return [*times, comparison[0], *memory, comparison[1]]


def _claims_table(case: str, judged: Sequence[Judged]) -> Table:
    table = Table("claim", "measured", "of bests", "bound", "possible here", "holds", title=f"{case}: claims")
    for one in judged:
        holds = "yes" if one.holds else "[red]no"
        possible = "" if one.possible is None else f"{one.possible:.3f}"
        table.add_row(one.text, f"{one.figure:.3f}", f"{one.best:.3f}", one.bound, possible, holds)
    return table
