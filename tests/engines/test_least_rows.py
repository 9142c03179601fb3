"""Mini-batches that are split into fewer micro-batches for the sake of batch norm: engines agree to the bit.

For engine=processes see test_processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpipe_cli.engines import offload, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.profiling.records import Sample
from tests.distributed.cases import CPU, Case, run
from tests.distributed.tasks import make

CASE = Case("normed_rows", rows=(10, 6, 5, 2), least_rows=2)


def spec(folder: Path, balance: list[int], schedule: str, checkpoint: str) -> EngineSpec:
    task = make(CASE.task, 3)
    return EngineSpec(
        task.model,
        CASE.objective(task.loss),
        balance,
        [CPU] * len(balance),
        chunks=CASE.chunks,
        eval_chunks=3,
        least_rows=CASE.least_rows,
        schedule=schedule,
        checkpoint=checkpoint,
        scratch=folder,
        make_sample=lambda: Sample(task.input, task.target, task.loss),
    )


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "threads, gpipe": lambda folder: threads.build(spec(folder, [2, 3, 2], "gpipe", "except_last")),
    "threads, zero bubble": lambda folder: threads.build(spec(folder, [2, 5], "zero_bubble", "always")),
    "offload": lambda folder: offload.build(spec(folder, [7], "gpipe", "always"), slices=3),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_short_mini_batches_give_the_bits_of_one_thread(
    engine: Callable[[Path], Engine], tmp_path: Path
) -> None:
    ours, expected = run(CASE, engine(tmp_path), CASE.batch), run(CASE, CASE.alone(), CASE.batch)
    assert [{**facts, "transfers": None, "timeline": None} for facts in ours.facts] == expected.facts
    for part in ("model", "optimizer"):
        tensors, others = getattr(ours.state, part), getattr(expected.state, part)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in others), part


def test_batch_norm_rejects_the_micro_batch_of_one_row_that_equal_parts_would_make() -> None:
    """A last batch of 6 images in 4 chunks ended a newcomer's first epoch, and with it the run."""
    case = replace(CASE, rows=(6,), least_rows=1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        run(case, case.alone(), case.batch)
