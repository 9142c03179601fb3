"""This process as one of several ranks, none of the others being there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.distributed import setup_process_groups


class Become(Protocol):
    def __call__(self, rank: int, size: int, *axes: tuple[str, float]) -> None:
        """Take the place of a rank, in process groups along the axes if there are any."""


def leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def become() -> Iterator[Become]:
    def take(rank: int, size: int, *axes: tuple[str, float]) -> None:
        leave()
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        if axes:
            setup_process_groups(axes)

    yield take
    leave()
