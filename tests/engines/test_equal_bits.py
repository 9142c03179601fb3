"""Every engine in one process gives the bits of engine=single; for engine=processes see test_processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.profiling.records import Sample
from tests.distributed.cases import CPU, Case, run
from tests.distributed.tasks import make
from tests.sequential.test_deferred import unload

KEYWORDS = Case("keyword_arguments", rows=(10, 3, 10, 9))
"""Skips cross partitions that do not use them: a mask, whole numbers, and tensors without elements."""
SHORT = Case("normed_rows", rows=(10, 6, 5, 2), least_rows=2)
"""Mini-batches that are split into fewer micro-batches for the sake of batch norm."""
TIED = Case("tied", rows=(10, 3))


def spec(case: Case, folder: Path, balance: list[int], workers: int, **changes: Any) -> EngineSpec:
    task = make(case.task, 3)
    if case is TIED:  # its parameters are still in files
        unload(task.model, [])
    return EngineSpec(
        task.model,
        case.objective(task.loss),
        balance,
        [CPU] * workers,
        chunks=case.chunks,
        eval_chunks=3,
        least_rows=case.least_rows,
        scratch=folder,
        make_sample=lambda: Sample(task.input, task.target, task.loss),
        **changes,
    )


def partitions(
    case: Case, balance: list[int], offload: str | None = None, workers: int | None = None, **changes: str
) -> tuple[Case, Callable[[Path], Engine]]:
    count = workers or len(balance)
    return case, lambda folder: threads.build(spec(case, folder, balance, count, **changes), offload)


def slices(case: Case, to: str, count: int, **changes: str) -> tuple[Case, Callable[[Path], Engine]]:
    whole = [len(make(case.task, 3).model)]
    return case, lambda folder: offload.build(spec(case, folder, whole, 1, **changes), to=to, slices=count)


def one_thread(case: Case) -> tuple[Case, Callable[[Path], Engine]]:
    whole = [len(make(case.task, 3).model)]
    return case, lambda folder: single.build(spec(case, folder, whole, 1))


def halves(case: Case) -> list[int]:
    count = len(make(case.task, 3).model)
    return [count // 2, count - count // 2]


keywords, short = partial(partitions, KEYWORDS, [1, 3, 1, 3]), partial(partitions, SHORT)
ENGINES = {
    "keyword arguments, gpipe": keywords(schedule="gpipe", checkpoint="except_last"),
    "keyword arguments, 1f1b": keywords(schedule="1f1b", checkpoint="always"),
    "keyword arguments, zero bubble": keywords(schedule="zero_bubble", checkpoint="never"),
    "keyword arguments, interleaved": keywords(schedule="interleaved", checkpoint="always", workers=2),
    "keyword arguments, host memory": keywords("cpu", schedule="gpipe", checkpoint="always"),
    "keyword arguments, disk": keywords("disk", schedule="1f1b", checkpoint="never"),
    "keyword arguments, offload to host memory": slices(KEYWORDS, "cpu", 4, checkpoint="always"),
    "keyword arguments, offload to disk": slices(KEYWORDS, "disk", 4, checkpoint="except_last"),
    "keyword arguments, offload, nothing recomputed": slices(KEYWORDS, "disk", 4, checkpoint="never"),
    "short mini-batches, gpipe": short([2, 3, 2], schedule="gpipe", checkpoint="except_last"),
    "short mini-batches, zero bubble": short([2, 5], schedule="zero_bubble", checkpoint="always"),
    "short mini-batches, offload": slices(SHORT, "cpu", 3, checkpoint="always"),
    "parameters in files, single": one_thread(TIED),
    "parameters in files, threads": partitions(TIED, halves(TIED)),
    "parameters in files, host memory": partitions(TIED, halves(TIED), "cpu"),
    "parameters in files, offload to host memory": slices(TIED, "cpu", 2),
    "parameters in files, offload to disk": slices(TIED, "disk", 2),
}


@pytest.mark.parametrize(("case", "build"), ENGINES.values(), ids=ENGINES.keys())
def test_every_engine_gives_the_bits_of_one_thread(
    case: Case, build: Callable[[Path], Engine], tmp_path: Path
) -> None:
    ours, expected = run(case, build(tmp_path), case.batch), run(case, case.alone(), case.batch)
    assert [{**facts, "transfers": None, "timeline": None} for facts in ours.facts] == expected.facts
    for part in ("model", "optimizer"):
        tensors, others = getattr(ours.state, part), getattr(expected.state, part)
        assert tensors.keys() == others.keys()
        assert [name for name in others if not torch.equal(tensors[name], others[name])] == []


def test_batch_norm_rejects_the_micro_batch_of_one_row_that_equal_parts_would_make() -> None:
    """A last batch of 6 images in 4 chunks ended a newcomer's first epoch, and with it the run."""
    case = replace(SHORT, rows=(6,), least_rows=1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run(case, case.alone(), case.batch)
