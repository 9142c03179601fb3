from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpipe_cli
from gpipe_cli.distributed.team import Team

RANK = """
import os, sys, torch.distributed
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
from gpipe_cli.distributed.team import Team
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
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
    environment = {**os.environ, "PYTHONPATH": str(Path(gpipe_cli.__file__).parents[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
