"""Every engine trains a model whose parameters are still in files to the bits of one that is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.profiling.records import Sample
from tests.distributed.cases import CPU, Case, run
from tests.distributed.tasks import make
from tests.sequential.test_deferred import unload

CASE = Case("tied", rows=(10, 3))


def spec(folder: Path, balance: list[int]) -> EngineSpec:
    task = make(CASE.task, 3)
    unload(task.model, [])
    return EngineSpec(
        task.model,
        CASE.objective(task.loss),
        balance,
        [CPU] * len(balance),
        chunks=CASE.chunks,
        eval_chunks=3,
        scratch=folder,
        make_sample=lambda: Sample(task.input, task.target, task.loss),
    )


def layers() -> list[int]:
    count = len(make(CASE.task, 3).model)
    return [count // 2, count - count // 2]


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "single": lambda folder: single.build(spec(folder, [sum(layers())])),
    "threads": lambda folder: threads.build(spec(folder, layers())),
    "threads, parameters in host memory": lambda folder: threads.build(spec(folder, layers()), "cpu"),
    "offload to host memory": lambda folder: offload.build(spec(folder, [sum(layers())]), slices=2),
    "offload to disk": lambda folder: offload.build(spec(folder, [sum(layers())]), to="disk", slices=2),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_parameters_in_files_train_to_the_same_bits(engine: Callable[[Path], Engine], tmp_path: Path) -> None:
    ours, expected = run(CASE, engine(tmp_path), CASE.batch), run(CASE, CASE.alone(), CASE.batch)
    for mine, theirs in zip(ours.facts, expected.facts, strict=True):
        assert {**mine, "transfers": None, "timeline": None} == theirs
    for part in ("model", "optimizer"):
        tensors, others = getattr(ours.state, part), getattr(expected.state, part)
        assert tensors.keys() == others.keys()
        assert [name for name in others if not torch.equal(tensors[name], others[name])] == []
