"""Compare the memory and time of offloading to disk with a plain run of the same model.

    python -m benchmarks.offload [--gib 2] [--slices 16] [--folder .] [--short]

A stack of linear layers of 3072 x 3072 under AdamW. Every case runs in a process of its own, whose peak is VmHWM
(ru_maxrss would include the parent's). Claims: a peak of at most 25 % of the plain run's; a run under an address
limit of 4 GB that kills the plain run; a step of at most 1.5 times 4/3 of the plain forward and backward plus its
optimizer; waiting for loads at most half of that without prefetch. The exit code is the number of missed claims.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 3072
MAX_PEAK_SHARE = 0.25
ADDRESS_LIMIT = 4 * 10**9
MAX_STEP_COST = 1.5
MAX_WAIT_SHARE = 0.5


def main() -> int:
    arguments = _arguments()
    if arguments.case is not None:
        sys.stdout.write(json.dumps(_run(json.loads(arguments.case))))
        return 0
    layers = max(2, round(arguments.gib * 2**30 / (4 * WIDTH**2)))
    common = {
        "layers": layers,
        "slices": min(arguments.slices, layers),
        "steps": 2 if arguments.short else 6,
        "folder": arguments.folder,
        "prefetch": True,
        "batch": 256,
        "limit": None,
    }
    console = Console()
    console.print(f"{layers} layers, {common['slices']} slices, {arguments.gib} GiB of parameters")
    plain = _case({**common, "kind": "plain"})
    disk = _case({**common, "kind": "disk"})
    small_plain, small = (
        _case({**common, "kind": "plain", "batch": 32}),
        _case({**common, "kind": "disk", "batch": 32}),
    )
    waiting = _case({**common, "kind": "disk", "prefetch": False})
    limited = {
        kind: _case({**common, "kind": kind, "limit": ADDRESS_LIMIT, "steps": 1})
        for kind in ("plain", "disk")
    }
    table = Table("what", "offload", "plain", "ratio", "at most", box=None)
    missed = _row(table, "peak, GB", disk["peak"] / 1e9, plain["peak"] / 1e9, MAX_PEAK_SHARE)
    missed += _row(table, "step, batch 256, s", disk["step"], _expected(plain), MAX_STEP_COST)
    _row(table, "step, batch 32, s", small["step"], _expected(small_plain), None)
    missed += _row(table, "waited / without prefetch, s", disk["waited"], waiting["waited"], MAX_WAIT_SHARE)
    console.print(table)
    for kind, result in limited.items():
        console.print(f"within {ADDRESS_LIMIT:,} bytes of addresses, {kind}: {'runs' if result else 'dies'}")
    return missed + (not limited["disk"]) + bool(limited["plain"])


def _expected(plain: dict[str, Any]) -> float:
    """The step time if every forward runs twice."""
    return float(4 / 3 * plain["passes"] + plain["optimizer"])


def _row(table: Table, name: str, offload: float, plain: float, bound: float | None) -> bool:
    ratio = offload / plain
    table.add_row(
        name, f"{offload:.3f}", f"{plain:.3f}", f"{ratio:.2f}", "-" if bound is None else f"{bound:.2f}"
    )
    return bound is not None and ratio > bound


def _case(case: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own; empty if the process died."""
    words = [sys.executable, "-m", "benchmarks.offload", "--case", json.dumps(case)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=None if case["limit"] is None else subprocess.DEVNULL
    )
    if done.returncode != 0 and case["limit"] is None:
        raise SystemExit(f"{case}: ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return result


def _run(case: dict[str, Any]) -> dict[str, Any]:
    """Runs in the child process: torch is imported after the limit is set."""
    if case["limit"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (case["limit"], case["limit"]))
    result = _plain(case) if case["kind"] == "plain" else _disk(case)
    return {**result, "peak": _peak()}


def _model(case: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(case["layers"])))


def _batch(case: dict[str, Any]) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, case["batch"], WIDTH, generator=generator).unbind()


def _plain(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    from gpipe_cli.pipeline.gpipe import plain_pipe

    pipe = plain_pipe(_model(case))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    input, target = _batch(case)
    passes, updates = [], []
    for step in range(case["steps"]):
        began = time.perf_counter()
        pipe.step(input, target, nn.functional.mse_loss, key=step)
        between = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - between)
        passes.append(between - began)
        optimizer.zero_grad(set_to_none=True)
    return {"passes": _median(passes), "optimizer": _median(updates)}


def _disk(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch import nn

    from gpipe_cli.engines import offload
    from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
    from gpipe_cli.profiling.records import Sample
    from gpipe_cli.sequential.deferred import defer_parameters, fill_others
    from gpipe_cli.torch_internals.deferred_values import DeferredValues

    folder, values = Path(case["folder"]), DeferredValues()
    with values.recording():
        model = _model(case)
    defer_parameters(model, values)
    fill_others([model], values)
    spec = EngineSpec(
        model,
        TrainingObjective(
            nn.functional.mse_loss, lambda output, target: {}, partial(torch.optim.AdamW, lr=1e-4)
        ),
        [len(model)],
        [torch.device("cpu")],
        chunks=1,
        eval_chunks=1,
        checkpoint="always",
        scratch=folder,
        make_sample=lambda: Sample(*_batch(case), nn.functional.mse_loss),
    )
    engine = offload.build(spec, to="disk", slices=case["slices"], prefetch=case["prefetch"])
    times, waited = [], []
    for step in range(case["steps"]):
        began = time.perf_counter()
        facts = engine.train_step(_batch(case), step, 1e-4)
        times.append(time.perf_counter() - began)
        assert facts.transfers is not None
        waited.append(facts.transfers.waited_seconds)
    engine.close()
    return {"step": _median(times), "waited": _median(waited)}


def _median(times: list[float]) -> float:
    """The median without the first step, which allocates memory."""
    return statistics.median(times[1:] or times)


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--short", action="store_true", help="two steps for each case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
