"""gpipe train shard=optimizer: the snapshots and results of a run without it, in whichever of its parts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.command_line import Gpipe
from tests.support.run_files import snapshot_tensors

WORDS = (
    *(
        "model=mlp",
        "model.depth=9",
        "model.width=128",
        "balance=size",
        "data=digits",
        "engine=processes",
        "partitions=2",
        "data_parallel=2",
        "threads=1",
    ),
    *("ema=0.9", "clip_grad_norm=0.5", "optimizer.no_decay=[bias]", "lr_schedule=constant"),
)


def tensors(run: Path) -> dict[str, bytes]:
    """All tensors of the last snapshot, in however many files they are."""
    folder = max((run / "snapshots").glob("step-*"))
    return {
        f"{kind} {name}": tensor.numpy().tobytes()
        for kind in ("model", "optimizer")
        for name, tensor in snapshot_tensors(folder, kind).items()
    }


def test_a_replica_s_estimate_has_its_share_of_the_optimizer_s_state(gpipe: Gpipe) -> None:
    whole, sharded = (
        gpipe("train", *WORDS, *more, "--dry-run", "--json").json["partitions"]
        for more in ([], ["shard=optimizer"])
    )
    shares = [
        ours["optimizer_bytes"] / without["optimizer_bytes"]
        for ours, without in zip(sharded, whole, strict=True)
    ]
    # The first partition is a single layer, whose weight one replica has as a whole.
    assert shares[0] > 0.99 and 0.5 <= shares[1] < 0.55
    assert [row["gradient_bytes"] for row in sharded] == [row["gradient_bytes"] for row in whole]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_with_and_without_shards_to_the_same_bits(gpipe: Gpipe, tmp_path: Path) -> None:
    def train(run: str, *words: str) -> dict[str, bytes]:
        answer = gpipe(
            "train", f"{'resume' if (tmp_path / run).exists() else 'run_dir'}={tmp_path / run}", *words
        )
        assert answer.code == 0, answer.err
        return tensors(tmp_path / run)

    def resume(run: str, *words: str) -> dict[str, bytes]:
        copy = tempfile.mkdtemp(dir=tmp_path)
        shutil.copytree(tmp_path / run, copy, dirs_exist_ok=True)
        return train(Path(copy).name, *words)

    whole, sharded = (train(shard, *WORDS, "steps=2", f"shard={shard}") for shard in ("none", "optimizer"))
    assert whole == sharded and {name.split()[0] for name in whole} >= {"model", "optimizer"}
    straight = train("straight", *WORDS, "steps=3")
    for run, other in (("none", "optimizer"), ("optimizer", "none")):
        assert resume(run, "steps=3") == straight
        assert resume(run, "steps=3", f"shard={other}") == straight
    for words in (
        ("engine=single",),
        ("engine=threads", "schedule=1f1b"),
        ("partitions=1", "data_parallel=3", "shard=optimizer"),
    ):
        assert resume("none", *words, "steps=3") == resume("optimizer", *words, "steps=3")
    answer = gpipe("train", f"resume={tmp_path / 'optimizer'}", "data_parallel=1", "steps=3")
    assert answer.code == 2 and "and there is one; give data_parallel=2 or shard=none" in answer.err
