"""`python -m benchmarks.run`: measures cases and prints tables; see README.md here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cases import CASES
from benchmarks.claims import judge
from benchmarks.harness import Candidate, measure
from benchmarks.other_load import warn_if_busy
from benchmarks.report import as_json, environment, show
from benchmarks.systems import SYSTEMS

STANDARD_CASES = ("mlp", "transformer", "resnet50", "empty")
WITHOUT_PARAMETERS = {"empty"}
"""torch.distributed.pipelining is left out there: it is measured on models, not on messages."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 11)
    console, status = Console(), Console(stderr=True)
    surroundings = environment()
    warn_if_busy(status)
    documents = [
        _run(case, options.system, rounds, console, status) for case in options.case or STANDARD_CASES
    ]
    if options.json is not None:
        document = {"environment": surroundings, "rounds": rounds, "cases": documents}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def _run(
    case: str, wanted: list[str] | None, rounds: int, console: Console, status: Console
) -> dict[str, Any]:
    candidates = [
        Candidate(name, system.threads, system.processes)
        for name, system in SYSTEMS.items()
        if (wanted is None or name in wanted) and not (case in WITHOUT_PARAMETERS and system.processes > 1)
    ]
    with status.status(case) as line:
        results = measure(case, candidates, rounds, line.update)
    verdicts = judge(case, {result.system: result for result in results})
    show(console, case, results, verdicts)
    return as_json(case, results, verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "--case", action="append", choices=CASES, help="may be given again; default: all but tiny"
    )
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="may be given again; default: all")
    parser.add_argument("--rounds", type=int, help="how often each system runs; default: 11")
    parser.add_argument("--quick", action="store_true", help="3 rounds: a look, not a figure to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured to a file")
    return parser


if __name__ == "__main__":
    main()
