"""Slices in turn on a device: what is loaded when, and what a step's record shows of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.errors import ResourceError
from gpipe_cli.offload.cut import parameters_of
from gpipe_cli.offload.pipe import OffloadedPipe
from gpipe_cli.offload.rotation import Rotation
from gpipe_cli.offload.slice import Part
from gpipe_cli.offload.tiers import DiskTier, Tier
from gpipe_cli.schedule.action import Action

CPU = torch.device("cpu")


class Watched:
    """A tier that writes down which of its regions are read and written."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.reserve, self.close, self.leaves = tier.reserve, tier.close, lambda device: False
        self.moves: list[str] = []
        self._count = 0

    def region(self, nbytes: int) -> Any:
        region, name = self._tier.region(nbytes), self._count
        self._count += 1
        read, write = region.read, region.write

        def noted_read(begin: int, into: Tensor) -> None:
            self.moves.append(f"read {name}")
            read(begin, into)

        def noted_write(begin: int, source: Tensor) -> None:
            self.moves.append(f"write {name}")
            write(begin, source)

        region.read, region.write = noted_read, noted_write  # type: ignore[method-assign]
        return region


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    tier = Watched(DiskTier(tmp_path))
    yield tier
    tier.close()


def rotation_of(module: nn.Sequential, tier: Tier, **settings: Any) -> Rotation:
    slices = parameters_of(module, [1] * len(module)).on(tier)
    return Rotation(slices, tier, CPU, **settings)


def step(module: nn.Sequential, rotation: Rotation, recorder: Any = None, checkpoint: str = "always") -> None:
    pipe = OffloadedPipe(
        module, [1] * len(module), devices=[CPU], stores=[rotation], chunks=2, checkpoint=checkpoint
    )
    pipe.recorder = recorder
    pipe.step(torch.ones(4, 4), torch.zeros(4, 4), nn.functional.mse_loss, key=1)
    pipe.close()


def test_each_slice_is_read_once_on_the_way_there_and_once_on_the_way_back(watched: Watched) -> None:
    module = model()
    rotation = rotation_of(module, watched)
    watched.moves.clear()
    step(module, rotation)
    rotation.settle()
    # The last is still there when backward begins, and of two rooms one still holds the slice before it.
    assert watched.moves == ["read 0", "read 1", "read 2", "read 0"]
    rotation.close()


def test_with_one_room_they_come_when_they_are_needed(watched: Watched) -> None:
    module = model()
    rotation = rotation_of(module, watched, rooms=1, beside=False)
    watched.moves.clear()
    step(module, rotation)
    assert watched.moves == ["read 0", "read 1", "read 2", "read 1", "read 0"]
    rotation.close()


def test_a_record_of_a_step_shows_loads_and_drops(watched: Watched) -> None:
    class Recorder:
        seen: list[str]

        def __init__(self) -> None:
            self.seen = []

        def now(self, device: torch.device) -> int:
            return len(self.seen)

        def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None:
            if phase != "copy":
                self.seen.append(f"{phase} {action}")

    module, recorder = model()[:2], Recorder()
    rotation = rotation_of(module, watched)
    step(module, rotation, recorder)
    assert recorder.seen == [
        "load F0.0",
        "forward F0.0",
        "forward F0.1",
        "drop F0.1",
        "load F1.0",
        "forward F1.0",
        "forward F1.1",
        "recompute B1.0",
        "backward B1.0",
        "recompute B1.1",
        "backward B1.1",
        "drop B1.1",
        "load B0.0",
        "recompute B0.0",
        "backward B0.0",
        "recompute B0.1",
        "backward B0.1",
        "drop B0.1",
    ]
    rotation.close()


def test_weights_come_back_to_where_autograd_left_them(watched: Watched) -> None:
    """Without recomputation the graph of a forward holds views of the weights: they must find the same numbers."""
    module, plain = model(), model()
    rotation = rotation_of(module, watched)
    step(module, rotation, checkpoint="never")
    for half in torch.ones(4, 4).chunk(2):
        (nn.functional.mse_loss(plain(half), torch.zeros(2, 4)) / 2).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    rotation.close()


def test_a_tour_brings_all_and_keeps_what_changed(watched: Watched) -> None:
    module = model()
    before = [watched_value.clone() for watched_value in model().parameters()]
    rotation = rotation_of(module, watched)
    for slice in rotation.tour([Part.WEIGHTS], [Part.WEIGHTS]):
        with torch.no_grad():
            for parameter in slice.parameters:
                parameter.add_(1)
    rotation.settle()
    rotation.forget()
    found = [
        parameter.detach().clone()
        for slice in rotation.tour([Part.WEIGHTS], [])
        for parameter in slice.parameters
    ]
    for mine, theirs in zip(found, before, strict=True):
        assert torch.equal(mine, theirs + 1)
    rotation.close()


def test_a_disk_that_fails_is_told_where_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    rotation = rotation_of(module, DiskTier(tmp_path))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ResourceError, match="cannot be kept there: Input/output error"):
        step(module, rotation)
    rotation.close()
