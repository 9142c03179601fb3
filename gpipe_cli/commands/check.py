"""gpipe check: test this machine, with a verdict and what to do in each row, ready to paste into an issue.

Writes check.json, env.json and report.html to a directory of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from gpipe_cli.accelerator.devices import default_partitions, resolve_devices
from gpipe_cli.check.bits import check_bits
from gpipe_cli.check.children import check_races, check_ranks
from gpipe_cli.check.hardware import check_counters, check_devices, check_links
from gpipe_cli.check.row import Check, Machine, Row, Verdict, run_check, worst
from gpipe_cli.check.speed import check_overlap, check_speed
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import CheckConfig
from gpipe_cli.errors import GpipeError
from gpipe_cli.report.environment import environment
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.render import PAGE
from gpipe_cli.report.tables import print_check_rows, print_facts
from gpipe_cli.runs.directory import check_run_dir, make_run_directory, write_json
from gpipe_cli.runs.summary import write_report

CHECKS: dict[str, Check] = {
    "devices": check_devices,
    "memory counters": check_counters,
    "links": check_links,
    "bits": check_bits,
    "stream races": check_races,
    "overlap": check_overlap,
    "speed-up": check_speed,
    "ranks": check_ranks,
}
"""In this order: a row explains those below it."""


def run(settings: CheckConfig, job: Job) -> Summary:
    machine = Machine.of(resolve_devices(settings.devices, default_partitions(settings.devices)))
    check_run_dir(settings.run_dir)

    began = time.monotonic()
    rows: list[Row] = []
    for name, check in CHECKS.items():
        print_status(f"checking {name}")
        rows += run_check(name, check, machine, debug=job.debug)
    summary: dict[str, Any] = {
        "verdict": str(worst(row.verdict for row in rows)),
        "devices": [str(device) for device in machine.workers],
        "rows": [row.facts() for row in rows],
        "seconds": time.monotonic() - began,
        "command": job.line,
    }

    directory = make_run_directory(settings.run_dir, "check", machine.workers[0].type)
    facts = environment()
    write_json(directory / "env.json", facts)
    write_json(directory / "check.json", summary)
    write_report(directory)
    document = {**summary, "environment": facts, "run_dir": str(directory)}
    if job.shows_result:
        _print(summary, facts, directory)
    if problems := [row.name for row in rows if row.verdict is Verdict.PROBLEM]:
        if job.json:
            sys.stdout.write(f"{json.dumps(document)}\n")
        raise GpipeError(
            f"{len(problems)} of {len(rows)} rows report a problem: {', '.join(problems)}; "
            "each row says what to do"
        )
    return document


def _print(summary: dict[str, Any], facts: dict[str, Any], directory: Path) -> None:
    print_check_rows(summary["rows"])
    versions = {
        name: facts[name] for name in ("gpipe", "torch", "python", "platform", "cuda", "rocm") if facts[name]
    }
    files = {"run_dir": str(directory), "report": str(directory / PAGE)}
    print_facts("", {**versions, "seconds": summary["seconds"], **files})
