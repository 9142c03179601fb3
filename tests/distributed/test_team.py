from __future__ import annotations

from pathlib import Path

from gpipe_cli.distributed.team import Team
from tests.distributed.started import run_ranks


def test_one_process_agrees_with_itself() -> None:
    alone = Team.present()
    assert alone == Team() and alone.leads
    assert alone.largest(3) == alone.smallest(3) == 3 and alone.of_leader("runs/1") == "runs/1"


def agree(rank: int, ranks: int, folder: Path) -> None:
    team = Team.present()
    assert (team.rank, team.size, team.leads) == (rank, ranks, rank == 0)
    assert team.largest(rank * 7) == 7 and team.smallest(rank - 3) == -3
    assert team.of_leader(f"grüß {rank}") == "grüß 0"


def test_several_agree_on_numbers_and_take_the_word_of_the_first(tmp_path: Path) -> None:
    run_ranks(agree, 2, tmp_path)
