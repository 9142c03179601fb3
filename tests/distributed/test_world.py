from __future__ import annotations

from pathlib import Path

import torch

from gpipe_cli.distributed.world import (
    World,
    broadcast_json,
    broadcast_numbers,
    broadcast_tensor,
    gather_json,
    gather_numbers,
    sum_of_numbers,
)
from tests.support.forked_ranks import run_ranks


def test_a_single_process_agrees_with_itself() -> None:
    alone = World.current()
    assert alone == World() and alone.is_rank_zero
    assert alone.max(3) == alone.min(3) == 3 and alone.from_rank_zero("runs/1") == "runs/1"


def test_without_a_group_a_message_is_what_was_given() -> None:
    numbers = torch.tensor([2.0, 3.0], dtype=torch.float64)
    assert broadcast_json({"a": [1]}, 0, None) == {"a": [1]} and gather_json(3, None) == [3]
    for exchanged in (broadcast_numbers(numbers, 0, None), broadcast_tensor(numbers, 0, None)):
        assert exchanged.equal(numbers)
    assert sum_of_numbers(numbers, None).equal(numbers)
    assert gather_numbers(numbers, None).equal(numbers.unsqueeze(0))


def agree(rank: int, ranks: int, folder: Path) -> None:
    world = World.current()
    assert (world.rank, world.size, world.is_rank_zero) == (rank, ranks, rank == 0)
    assert world.max(rank * 7) == 7 and world.min(rank - 3) == -3
    assert world.from_rank_zero([f"grüß {rank}", rank]) == ["grüß 0", 0]


def test_several_processes_agree_on_numbers_and_on_the_text_of_rank_zero(tmp_path: Path) -> None:
    run_ranks(agree, 2, tmp_path)
