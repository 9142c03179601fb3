from __future__ import annotations

from pathlib import Path

from gpipe_cli.distributed.world import World
from tests.support.forked_ranks import run_ranks


def test_a_single_process_agrees_with_itself() -> None:
    alone = World.current()
    assert alone == World() and alone.is_rank_zero
    assert alone.max(3) == alone.min(3) == 3 and alone.from_rank_zero("runs/1") == "runs/1"


def agree(rank: int, ranks: int, folder: Path) -> None:
    world = World.current()
    assert (world.rank, world.size, world.is_rank_zero) == (rank, ranks, rank == 0)
    assert world.max(rank * 7) == 7 and world.min(rank - 3) == -3
    assert world.from_rank_zero([f"grüß {rank}", rank]) == ["grüß 0", 0]


def test_several_processes_agree_on_numbers_and_on_the_text_of_rank_zero(tmp_path: Path) -> None:
    run_ranks(agree, 2, tmp_path)
