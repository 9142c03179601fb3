from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import torch
from torch import nn

from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.training import snapshot
from gpipe_cli.training.snapshot import load_weights, newest_weights, save_weights


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.float64))


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    first, second = model(), model()
    path = save_weights(first, tmp_path, 12)
    assert path == tmp_path / "snapshots" / "step-00000012" / "model.safetensors"
    load_weights(second, path)
    expected, found = first.state_dict(), second.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [entry.name for entry in path.parents[1].iterdir()] == ["step-00000012"]


def test_tensors_that_share_memory_are_saved_under_each_name(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    tied[0].weight.data = tied[0].weight.data.t()  # nor are they all contiguous
    path = save_weights(tied, tmp_path, 1)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    load_weights(other, path)
    assert torch.equal(other[0].weight, tied[0].weight) and torch.equal(other[1].weight, tied[0].weight)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), safetensors.SafetensorError("no")])
def test_nothing_is_left_of_a_snapshot_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(snapshot, "save_file", half)
    with pytest.raises(
        ResourceError, match=r"step-00000003/model.safetensors: the weights cannot be written"
    ):
        save_weights(model(), tmp_path, 3)
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_snapshot_is_never_overwritten(tmp_path: Path) -> None:
    path = save_weights(model(), tmp_path, 3)
    before = path.read_bytes()
    with pytest.raises(ResourceError, match="the weights cannot be written"):
        save_weights(model(), tmp_path, 3)
    assert path.read_bytes() == before and len(list((tmp_path / "snapshots").iterdir())) == 1


def test_the_newest_snapshot_is_the_one_of_the_last_step(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save_weights(model(), tmp_path, step)
    assert newest_weights(str(tmp_path)).parent.name == "step-00000100"


def test_a_run_that_is_missing_or_saved_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run=.*nowhere: no such directory"):
        newest_weights(str(tmp_path / "nowhere"))
    (tmp_path / "snapshots" / "step-00000007.tmp").mkdir(parents=True)
    with pytest.raises(RunError, match="there is no snapshot in it"):
        newest_weights(str(tmp_path))


def test_weights_of_another_model_or_damaged_ones_are_told_apart(tmp_path: Path) -> None:
    path = save_weights(model(), tmp_path, 1)
    with pytest.raises(RunError, match=r"does not fit the model: .*size mismatch|does not fit the model"):
        load_weights(nn.Sequential(nn.Linear(3, 5)), path)
    for damaged in (b"", path.read_bytes()[:50], path.read_bytes()[:-1], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="damaged"):
            load_weights(model(), path)
