"""Ranks for tests: real processes that work through a list of cases once, each leaving what it found in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import distributed

from gpipe_cli import is_recomputing
from gpipe_cli.distributed import get_group, setup_process_groups
from gpipe_cli.engines.state import EngineState
from tests.distributed.cases import Case, Course, run
from tests.distributed.started import run_ranks

PATIENCE = timedelta(hours=1)
"""Whoever waits for the ranks knows how long they may take."""


def run_crew(folder: Path, ranks: int, cases: Sequence[Case], seconds: float) -> None:
    """Let so many ranks do all the cases; raise if one fails or they take longer."""
    run_ranks(partial(_work, cases), ranks, folder, seconds)


def found(folder: Path, case: Case, rank: int) -> Course:
    path = folder / f"{case.name}-{rank}"
    state = EngineState({})
    if (path / "model.safetensors").exists():
        numbers = json.loads((path / "numbers.json").read_text())
        parts = [load_file(path / f"{part}.safetensors") for part in ("model", "buffers", "optimizer")]
        state = EngineState(*parts, numbers)
    return Course(json.loads((path / "facts.json").read_text()), state)


def note(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """What a rank found out besides."""
    found: dict[str, Any] = json.loads((folder / f"{case.name}-{rank}" / "notes.json").read_text())
    return found


def _keep(path: Path, course: Course, notes: dict[str, Any]) -> None:
    path.mkdir()
    (path / "facts.json").write_text(json.dumps(course.facts))
    (path / "notes.json").write_text(json.dumps(notes))
    state = course.state
    if state.model:
        (path / "numbers.json").write_text(json.dumps(state.numbers))
        for name in ("model", "buffers", "optimizer"):
            tensors = {key: one.detach().clone() for key, one in getattr(state, name).items()}
            save_file(tensors, path / f"{name}.safetensors")


def _work(cases: Sequence[Case], rank: int, ranks: int, folder: Path) -> None:
    axes: list[tuple[str, int]] = []
    for case in cases:
        wanted = [("data", case.replicas), ("pipe", ranks // case.replicas)]
        if axes != wanted:
            axes = wanted
            setup_process_groups(axes, timeout=PATIENCE)
        _keep(folder / f"{case.name}-{rank}", *_do(case, ranks // case.replicas))


def _do(case: Case, ranks: int) -> tuple[Course, dict[str, Any]]:
    engine = case.on_ranks(ranks)
    module, replica = engine.module, distributed.get_rank(get_group("data"))
    if case.resumed:
        engine.load_state(run(case, case.alone(), case.batch, range(case.resumed)).state)
    notes: dict[str, Any] = {
        "bytes": sum(one.nbytes for one in module.parameters() if not one.is_meta),
        "all_bytes": sum(one.nbytes for one in module.parameters()),
    }
    recomputed = [0] * len(list(module))

    def count(layer: int) -> Any:
        def hook(*_: object) -> None:
            recomputed[layer] += is_recomputing()

        return hook

    for index, layer in enumerate(module):
        layer.register_forward_hook(count(index))
    course = Course()
    try:
        batch = partial(case.batch, replica=replica, replicas=case.replicas)
        course = run(case, engine, batch, range(case.resumed, len(case.rows)))
    except Exception as error:  # noqa: BLE001 - what it is decides the test
        notes |= {"error": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
    own = {name: one for name, one in module.state_dict().items() if not one.is_meta}
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in own.values())).hexdigest()
    order = list(course.state.model)
    return course, {**notes, "recomputed": recomputed, "own": digest, "order": order}
