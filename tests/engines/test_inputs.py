"""Every engine in one process gives the bits of engine=single for keyword arguments of changing lengths.

Skips cross partitions that do not use them: a mask, whole numbers, and tensors without elements. For engine=processes
see test_processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpipe_cli.engines import offload, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.profiling.records import Sample
from tests.distributed.cases import CPU, Case, run
from tests.distributed.tasks import make

CASE = Case("keyword_arguments", rows=(10, 3, 10, 9))


def spec(folder: Path, balance: list[int], schedule: str, checkpoint: str) -> EngineSpec:
    task = make(CASE.task, 3)
    return EngineSpec(
        task.model,
        CASE.objective(task.loss),
        balance,
        [CPU] * (2 if schedule == "interleaved" else len(balance)),
        chunks=CASE.chunks,
        eval_chunks=3,
        schedule=schedule,
        checkpoint=checkpoint,
        scratch=folder,
        make_sample=lambda: Sample(task.input, task.target, task.loss),
    )


def partitions(schedule: str, checkpoint: str, offload: str | None = None) -> Callable[[Path], Engine]:
    return lambda folder: threads.build(spec(folder, [1, 3, 1, 3], schedule, checkpoint), offload)


def slices(to: str, checkpoint: str) -> Callable[[Path], Engine]:
    return lambda folder: offload.build(spec(folder, [8], "gpipe", checkpoint), to=to, slices=4)


ENGINES = {
    "threads, gpipe": partitions("gpipe", "except_last"),
    "threads, 1f1b": partitions("1f1b", "always"),
    "threads, zero bubble": partitions("zero_bubble", "never"),
    "threads, interleaved": partitions("interleaved", "always"),
    "threads, parameters in host memory": partitions("gpipe", "always", "cpu"),
    "threads, parameters on disk": partitions("1f1b", "never", "disk"),
    "offload to host memory": slices("cpu", "always"),
    "offload to disk": slices("disk", "except_last"),
    "offload to disk without recomputation": slices("disk", "never"),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_keyword_arguments_of_any_length_give_the_bits_of_one_thread(
    engine: Callable[[Path], Engine], tmp_path: Path
) -> None:
    ours, expected = run(CASE, engine(tmp_path), CASE.batch), run(CASE, CASE.alone(), CASE.batch)
    for mine, theirs in zip(ours.facts, expected.facts, strict=True):
        assert {**mine, "transfers": None, "timeline": None} == theirs
    for part in ("model", "optimizer"):
        tensors, others = getattr(ours.state, part), getattr(expected.state, part)
        assert tensors.keys() == others.keys()
        assert [name for name in others if not torch.equal(tensors[name], others[name])] == []
