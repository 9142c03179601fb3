from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gpipe_cli.engines.state import module_state
from gpipe_cli.models.resnet import build
from gpipe_cli.runs.snapshots.contents import write_snapshot
from gpipe_cli.runs.snapshots.manifest import snapshot_path
from gpipe_cli.runs.snapshots.record import TrainingRecord, versions
from gpipe_cli.training.loop import Position
from gpipe_cli.vision import torchvision
from tests.support.command_line import Gpipe

ALLOW = "allow=[tiny_for_tests]"


def test_torchvision_loads_what_is_exported_without_gpipe(gpipe: Gpipe, tmp_path: Path) -> None:
    """As long as a sequence speaks the names of its original, so does a snapshot, and so does its export."""
    sequence = build("resnet18", num_classes=10)
    path = snapshot_path(tmp_path / "run", 1)
    path.parent.mkdir(parents=True)
    record = TrainingRecord(Position(1, 1.0), None, 1, 0, 1, versions(), {})
    write_snapshot(path, module_state(sequence), record, lambda: None)
    summary = gpipe("export", "run=run", "out=net.safetensors", "--json").json
    assert summary["bytes"] == (tmp_path / "net.safetensors").stat().st_size
    model = torchvision.models.resnet18(num_classes=10)
    model.load_state_dict(load_file(tmp_path / "net.safetensors"))
    assert torch.equal(model.fc.weight, sequence.state_dict()["fc.weight"])


def test_a_snapshot_and_an_exported_file_evaluate_to_the_same_results(tiny: Gpipe, tmp_path: Path) -> None:
    run = tiny("train", "threads=1", "run_dir=run", "snapshot.every=2", "snapshot.keep=9", "--json").json
    assert tiny("export", "run=run", "out=all.safetensors").code == 0
    words = [ALLOW, "threads=1", "--json"]
    assert (
        tiny("eval", "snapshot=run/snapshots/step-00000008", "partitions=4", *words).json["loss"]
        == run["loss"]
    )
    model = ["model._target_=tiny_for_tests.build", "data=synthetic", "data.shape=[3,8,8]", "data.length=64"]
    rest = ["batch_size=20", "chunks=3"]
    assert tiny("eval", "weights=all.safetensors", *model, *rest, *words).json["loss"] == run["loss"]
    assert tiny("export", "snapshot=run/snapshots/step-00000002", "out=early.safetensors").code == 0
    wrong = tiny("eval", "weights=early.safetensors", *model, "+model.width=5", *words)
    assert wrong.code == 2 and "weights=early.safetensors: made for another model" in wrong.err


def test_nothing_is_overwritten_and_nothing_damaged_is_exported(
    gpipe: Gpipe, tiny_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("precious")
    answer = gpipe("export", "run=run", "out=mine")
    assert (
        answer.code == 2
        and "out=mine: exists" in answer.err
        and (tmp_path / "mine").read_text() == "precious"
    )
    (path,) = tiny_run.glob("snapshots/*/optimizer.safetensors")
    path.write_bytes(b"")
    answer = gpipe("export", "run=run")
    assert answer.code == 4 and "every snapshot in it is damaged" in answer.err
    assert not (tmp_path / "model.safetensors").exists()
