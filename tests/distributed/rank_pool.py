"""Run a list of training cases on real ranks once; each rank writes its results to a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from gpipe_cli import is_recomputing
from gpipe_cli.distributed import get_group, setup_process_groups
from gpipe_cli.engines.engine import PipelineEngine
from gpipe_cli.engines.state import EngineState, merged_engine_numbers
from tests.distributed.cases import Case, CaseResult, run
from tests.support.forked_ranks import run_ranks

PARTS = ("model", "buffers", "optimizer")
GROUP_TIMEOUT = timedelta(hours=1)
"""Longer than any test: the test that waits for the ranks has a timeout of its own."""


def run_cases(folder: Path, ranks: int, cases: Sequence[Case], seconds: float) -> None:
    """Run all cases on this many ranks; raise if a rank fails or they take longer than `seconds`."""
    run_ranks(partial(_run_cases, cases), ranks, folder, seconds)


def load_result(folder: Path, case: Case, rank: int) -> CaseResult:
    """The facts that a rank knows, and its part of the state."""
    path = folder / f"{case.name}-{rank}"
    numbers = json.loads((path / "numbers.json").read_text())
    parts = [load_file(path / f"{part}.safetensors") for part in PARTS]
    return CaseResult(json.loads((path / "facts.json").read_text()), EngineState(*parts, numbers))


def load_whole(folder: Path, case: Case, ranks: int) -> CaseResult:
    """The facts, and the state of all ranks together: each tensor is part of the state of one rank."""
    results = [load_result(folder, case, rank) for rank in range(ranks)]
    states = [result.state for result in results]
    whole: dict[str, dict[str, Tensor]] = {}
    for part in PARTS:
        tensors: list[tuple[str, Tensor]] = [
            item for state in states for item in getattr(state, part).items()
        ]
        whole[part] = dict(tensors)
        assert len(whole[part]) == len(tensors), "two ranks have the same tensor"
    numbers = merged_engine_numbers([state.numbers for state in states])
    return replace(results[0], state=EngineState(**whole, numbers=numbers))


def load_notes(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """What a rank recorded besides facts and state: sizes, recomputations, errors."""
    notes: dict[str, Any] = json.loads((folder / f"{case.name}-{rank}" / "notes.json").read_text())
    return notes


def _save(path: Path, result: CaseResult, notes: dict[str, Any]) -> None:
    path.mkdir()
    (path / "facts.json").write_text(json.dumps(result.facts))
    (path / "notes.json").write_text(json.dumps(notes))
    state = result.state
    (path / "numbers.json").write_text(json.dumps(state.numbers))
    for name in PARTS:
        tensors = {key: tensor.detach().contiguous().clone() for key, tensor in getattr(state, name).items()}
        save_file(tensors, path / f"{name}.safetensors")


def _run_cases(cases: Sequence[Case], rank: int, ranks: int, folder: Path) -> None:
    axes: list[tuple[str, int]] = []
    for case in cases:
        wanted = [("data", case.replicas), ("pipe", ranks // case.replicas)]
        if axes != wanted:
            axes = wanted
            setup_process_groups(axes, timeout=GROUP_TIMEOUT)
        _save(folder / f"{case.name}-{rank}", *_run_case(case, ranks // case.replicas))


def _run_case(case: Case, ranks: int) -> tuple[CaseResult, dict[str, Any]]:
    engine = case.on_ranks(ranks)
    module, replica = engine.module, distributed.get_rank(get_group("data"))
    if case.resumed:
        engine.load_state(run(case, case.alone(), case.batch, range(case.resumed)).state)
    notes: dict[str, Any] = {
        "bytes": sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_meta),
        "all_bytes": sum(parameter.nbytes for parameter in module.parameters()),
    }
    recomputed = [0] * len(list(module))

    def count(layer: int) -> Any:
        def hook(*_: object) -> None:
            recomputed[layer] += is_recomputing()

        return hook

    for index, layer in enumerate(module):
        layer.register_forward_hook(count(index))
    result = CaseResult()
    try:
        batch = partial(case.batch, replica=replica, replicas=case.replicas)
        result = run(case, engine, batch, range(case.resumed, len(case.rows)))
    except Exception as error:  # noqa: BLE001 - the test checks which error it is
        notes |= {"error": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
    assert isinstance(engine, PipelineEngine)
    of_optimizer = engine._parameters.state(()).optimizer
    notes["optimizer_bytes"] = sum(tensor.nbytes for tensor in of_optimizer.values())
    own = {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
    # numpy has no bfloat16.
    content = b"".join(tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in own.values())
    digest = hashlib.sha256(content).hexdigest()
    return result, {**notes, "recomputed": recomputed, "own": digest}
