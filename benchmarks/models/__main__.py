"""`python -m benchmarks.models`: are traced models of Hugging Face, timm and torchvision the originals, to the bit?

Each model is checked in a process of its own, one after the other, with a time limit, so that no failure ends the run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console

from benchmarks.models import huggingface, timm_families, torchvision_models
from benchmarks.models.compare import Proof, prove
from benchmarks.models.exceptions import EXCEPTIONS
from benchmarks.models.subject import Subject

FAMILIES = {"hf": huggingface, "timm": timm_families, "torchvision": torchvision_models}


@final
@dataclass(frozen=True)
class Result:
    """A proof, or why there is none."""

    subject: Subject
    proof: Proof | None = None
    failure: str | None = None

    @property
    def is_as_expected(self) -> bool:
        return self.failure is None or (self.subject.name, self.subject.task) in EXCEPTIONS

    def as_json(self) -> dict[str, Any]:
        subject = self.subject
        facts = {} if self.proof is None else asdict(self.proof)
        return {
            "family": subject.family,
            "name": subject.name,
            "task": subject.task,
            "failure": self.failure,
            **facts,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # with more, some of torch's own gradients differ from run to run
    console = Console(highlight=False, soft_wrap=True)
    subjects = [
        subject
        for family in options.family or FAMILIES
        for subject in FAMILIES[family].subjects()
        if not options.only or subject.name in options.only
    ]
    console.print(f"{'model':<48} {'layers':>6} {'shared':>6} {'trace s':>8} {'all s':>7} {'GB':>5}")
    results = []
    for subject in subjects:
        results.append(prove_apart(subject, options.timeout))
        console.print(_line(results[-1]), markup=False)
    _print_score(results, console)
    if options.json is not None:
        options.json.write_text(json.dumps([result.as_json() for result in results], indent=2) + "\n")
    return 0 if all(result.is_as_expected for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument(
        "--family", action="append", choices=FAMILIES, help="may be given again; default: all"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="a model; may be given again")
    parser.add_argument("--timeout", type=int, default=900, help="seconds per model; default: 900")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    return parser


def prove_apart(subject: Subject, timeout: int) -> Result:
    # A fork has imported everything already, which takes longer than most comparisons. No thread runs here yet.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_prove_here, args=(subject, sender, timeout))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if isinstance(result, Proof):
        return Result(subject, proof=result)
    if process.exitcode == -signal.SIGALRM:
        return Result(subject, failure=f"not done within {timeout} s")
    return Result(subject, failure=result or f"the process ended with code {process.exitcode}")


def _prove_here(subject: Subject, sender: Connection, timeout: int) -> None:
    signal.alarm(timeout)  # ends this process
    try:
        sender.send(prove(subject))
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its result
        sender.send(" ".join("".join(traceback.format_exception_only(error)).split()))


def _line(result: Result) -> str:
    title = f"{result.subject.name} ({result.subject.task})"
    if result.proof is None:
        expected = "  (a known exception)" if result.is_as_expected else ""
        return f"{title:<48} failed: {result.failure}{expected}"
    proof = result.proof
    times = f"{proof.trace_seconds:>8.2f} {proof.seconds:>7.1f} {proof.gigabytes:>5.1f}"
    without = "  without recomputation" if proof.checkpoint == "never" else ""
    return f"{title:<48} {proof.layers:>6} {proof.shared:>6} {times}{without}"


def _print_score(results: Iterable[Result], console: Console) -> None:
    by_group: dict[str, list[Result]] = {}
    for result in results:
        by_group.setdefault(f"{result.subject.family}, {result.subject.task}", []).append(result)
        by_group.setdefault(result.subject.family, []).append(result)
    for group, members in by_group.items():
        equal = sum(result.failure is None for result in members)
        console.print(f"{group}: {equal} of {len(members)} to the bit")


if __name__ == "__main__":
    raise SystemExit(main())
