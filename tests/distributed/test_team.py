from __future__ import annotations

from pathlib import Path

from gpipe_cli.distributed.team import Team
from tests.distributed.started import run_ranks

RANK = """
import sys, torch.distributed
from gpipe_cli.distributed.team import Team
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}/store", rank=rank, world_size=2)
team = Team.present()
assert (team.rank, team.size, team.leads) == (rank, 2, rank == 0)
assert team.largest(rank * 7) == 7 and team.smallest(rank - 3) == -3
assert team.of_leader(f"grüß {rank}") == "grüß 0"
torch.distributed.destroy_process_group()
"""


def test_one_process_agrees_with_itself() -> None:
    alone = Team.present()
    assert alone == Team() and alone.leads
    assert alone.largest(3) == alone.smallest(3) == 3 and alone.of_leader("runs/1") == "runs/1"


def test_several_agree_on_numbers_and_take_the_word_of_the_first(tmp_path: Path) -> None:
    run_ranks(["-c", RANK], 2, tmp_path)
