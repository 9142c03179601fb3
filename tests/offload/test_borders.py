from __future__ import annotations

import gc
from pathlib import Path

import torch

from gpipe_cli.offload.borders import Borders
from gpipe_cli.offload.mover import Mover
from gpipe_cli.offload.tiers import DiskTier
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.pytree import flatten

CPU = torch.device("cpu")


def parcel(*tensors: torch.Tensor | None) -> PartitionInput:
    needs_grad = tuple(one is not None for one in tensors)
    return PartitionInput(tensors, needs_grad, flatten(tensors, "output")[1], values=len(tensors))


def test_a_parcel_comes_back_as_it_was_and_as_often_as_asked(tmp_path: Path) -> None:
    mover = Mover(CPU)
    borders = Borders(DiskTier(tmp_path), CPU, mover)
    given = parcel(torch.randn(3, 4, 5), None, torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    deposit = borders.put_away(given)
    assert deposit is not None
    for _ in range(2):
        found = deposit()
        assert found._replace(tensors=()) == given._replace(tensors=())
        for mine, theirs in zip(found.tensors, given.tensors, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    assert mover.moved_bytes > 0
    mover.close()


def test_two_deposits_do_not_mix_and_a_region_is_used_again_when_nobody_can_ask_for_it(
    tmp_path: Path,
) -> None:
    tier, mover = DiskTier(tmp_path), Mover(CPU, beside=False)
    regions: list[int] = []
    make = tier.region
    tier.region = lambda nbytes: regions.append(nbytes) or make(nbytes)  # type: ignore[method-assign,func-returns-value]
    borders = Borders(tier, CPU, mover)
    first, second = borders.put_away(parcel(torch.zeros(9))), borders.put_away(parcel(torch.ones(9)))
    assert first is not None and second is not None
    assert torch.equal(first().value[0], torch.zeros(9)) and torch.equal(second().value[0], torch.ones(9))
    assert len(regions) == 2
    del first
    gc.collect()
    third = borders.put_away(parcel(torch.full((9,), 2.0)))
    assert third is not None and len(regions) == 2
    assert torch.equal(second().value[0], torch.ones(9))


def test_a_tensor_with_holes_stays(tmp_path: Path) -> None:
    borders = Borders(DiskTier(tmp_path), CPU, Mover(CPU, beside=False))
    assert borders.put_away(parcel(torch.randn(4, 6)[:, ::2])) is None
    assert borders.put_away(parcel(torch.randn(4, 1).expand(4, 3))) is None
