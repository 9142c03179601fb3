"""Compare the step time of this checkout with that of another, to show what a change costs.

    python -m benchmarks.against /path/to/other/checkout [--case mlp] [--system 1f1b] [--rounds 11]

Both checkouts take turns in one run, each in processes of its own; cases and systems come from this checkout. A figure
is the median, with quartiles, over all rounds of the time here divided by the time there in the same round.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import final

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.claims import ACTIONS
from benchmarks.harness import Candidate, Ratio, SystemResult, measure
from benchmarks.other_load import warn_if_busy
from benchmarks.run import STANDARD_CASES
from benchmarks.systems import SYSTEMS

HERE = Path(__file__).resolve().parent.parent
DEFAULT_SYSTEMS = ("gpipe", "1f1b")
BOUND = 1.03
"""A larger ratio counts as slower."""
PLAIN, EMPTY = "plain", "empty"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    console, status = Console(), Console(stderr=True)
    warn_if_busy(status)
    comparison = _Comparison(f"{HERE} over {options.checkout}: time of a step, {options.rounds} rounds")
    for case in options.case or STANDARD_CASES:
        with status.status(case) as line:
            results = measure(case, _candidates(case, options), options.rounds, line.update)
        comparison.add(case, results)
    comparison.show(console)


@final
class _Comparison:
    def __init__(self, title: str) -> None:
        self._table = Table("case", "system", title=title)
        for heading in ("ratio", "quartiles", "of bests", "gradient", f"at most {BOUND:g}"):
            self._table.add_column(heading, justify="right")
        self._notes: list[str] = []
        self._slower = 0

    def add(self, case: str, results: Sequence[SystemResult]) -> None:
        """Add the results of a case, in the order of `_candidates`."""
        plain, others = (results[0], results[1:]) if case == EMPTY else (None, results)
        for ours, theirs in zip(others[::2], others[1::2], strict=True):
            if failure := ours.failure or theirs.failure:
                self._notes.append(f"{case}, {ours.system}: not measured: {failure.strip().splitlines()[-1]}")
                continue
            ratio = Ratio.of(ours.seconds, theirs.seconds)
            self._slower += ratio.median > BOUND
            self._table.add_row(case, ours.system, *_cells(ours, theirs, ratio))
            if plain is not None and plain.seconds:
                self._notes.append(f"{case}, {ours.system}: {_overhead(ours, theirs, plain)}")

    def show(self, console: Console) -> None:
        console.print(self._table)
        for note in self._notes:
            console.print(note, markup=False)
        console.print(f"slower: {self._slower}")


def _candidates(case: str, options: argparse.Namespace) -> list[Candidate]:
    """Each system in both checkouts; if layers are empty, first the plain step without a pipeline."""
    plain = [Candidate(PLAIN)] if case == EMPTY else []
    return plain + [
        Candidate(name, SYSTEMS[name].threads, SYSTEMS[name].processes, checkout)
        for name in options.system or DEFAULT_SYSTEMS
        for checkout in (HERE, options.checkout)
    ]


def _cells(ours: SystemResult, theirs: SystemResult, ratio: Ratio) -> list[str]:
    norm = (ours.squared_norm / theirs.squared_norm) ** 0.5 if theirs.squared_norm else 1.0
    return [
        f"{ratio.median:.3f}",
        f"{ratio.low:.3f} to {ratio.high:.3f}",
        f"{ours.best / theirs.best:.3f}",
        f"{norm:.5f}",
        "yes" if ratio.median <= BOUND else "[red]no",
    ]


def _overhead(ours: SystemResult, theirs: SystemResult, plain: SystemResult) -> str:
    """The pipeline's own cost per action, without the work of the loss and of autograd."""
    now, before = ((result.median - plain.median) / ACTIONS * 1e6 for result in (ours, theirs))
    return f"{now:.1f} microseconds per action beyond plain here, {before:.1f} there"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("checkout", type=_checkout, help="the folder of the other checkout")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default: all of run")
    parser.add_argument(
        "--system", action="append", choices=SYSTEMS, help="repeatable; default: gpipe and 1f1b"
    )
    parser.add_argument("--rounds", type=_rounds, default=11, help="how often each system runs; default: 11")
    return parser


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "gpipe_cli" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no gpipe_cli")
    return path


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} rounds have no quartiles; give at least 2")
    return int(text)


if __name__ == "__main__":
    main()
