"""gpipe train model.lora.rank=...: an adapter beside a frozen base, from training to peft's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import save_model, tiny_config
from tests.support.run_files import snapshot_tensors

LAST = "snapshots/step-00000004"
WORDS = [
    *("model=hf", "model.path=base", "threads=1"),
    *("model.lora.rank=2", "model.lora.targets=[q_proj,v_proj]", "model.lora.dropout=0.1"),
    *("data=text", "data.path=text.txt", "data.context=16"),
    *("batch_size=8", "chunks=4", "steps=4", "snapshot.every=2", "snapshot.keep=3"),
]
pytestmark = pytest.mark.slow


@pytest.fixture
def adapting(gpipe: Gpipe, tmp_path: Path) -> Gpipe:
    """Train an adapter of a tiny model with these words besides WORDS; returns the summary."""
    save_model(tmp_path / "base", "AutoModelForCausalLM", tiny_config(vocab_size=256))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)

    def train(*words: str) -> Any:
        answer = gpipe("train", *WORDS, *words, "--json")
        assert answer.code == 0, answer.err
        return answer.json

    return train


def state(snapshot: Path) -> dict[str, torch.Tensor]:
    return {**snapshot_tensors(snapshot), **snapshot_tensors(snapshot, "optimizer")}


def test_a_snapshot_has_the_adapter_and_refers_to_the_base(
    adapting: Gpipe, gpipe: Gpipe, tmp_path: Path
) -> None:
    summary = adapting("run_dir=run", "partitions=2")
    names = load_file(tmp_path / "run" / LAST / "model.safetensors")
    assert len(names) == 8 and all(".lora_" in name for name in names)
    base = json.loads((tmp_path / "run" / LAST / "manifest.json").read_text())["record"]["base"]
    files = {file.name for file in (tmp_path / "base").glob("*.safetensors")}
    assert base["directory"] == "base" and base["files"].keys() == {"config.json", *files}
    assert gpipe("eval", "run=run", "engine=single", "--json").json["loss"] == summary["loss"]
    # The base may move, but not change or disappear.
    (tmp_path / "base").rename(tmp_path / "moved")
    answers = [gpipe("eval", "run=run"), gpipe("train", "resume=run", "steps=6")]
    assert all(
        answer.code == 4 and "give model.path=<directory> if the base" in answer.err for answer in answers
    )
    assert gpipe("eval", "run=run", "model.path=moved", "--json").json["loss"] == summary["loss"]
    resumed = gpipe("train", "resume=run", "steps=6", "model.path=moved", "--json")
    assert resumed.code == 0, resumed.err
    assert gpipe("export", "run=run", "out=adapter", "format=peft").code == 0
    file = tmp_path / "moved" / min(files)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    answers = [gpipe("eval", "run=run"), gpipe("train", "resume=run", "steps=8")]
    assert all(answer.code == 4 and "has changed (content)" in answer.err for answer in answers)
    # eval also names the snapshot that it takes, before it reads it.
    assert [len(answer.err.splitlines()) for answer in answers] == [2, 1]
    assert answers[0].err.startswith("best: eval loss ")


@pytest.mark.parametrize("base", ["", "model.quantize=nf4"])
@pytest.mark.parametrize(
    "words",
    [
        "engine=threads partitions=2",
        "engine=threads partitions=4 schedule=zero_bubble checkpoint=always",
        "engine=threads partitions=4 schedule=1f1b checkpoint=never",
        "engine=threads partitions=5 balance=uniform",
        "engine=processes partitions=2",
        "engine=processes partitions=2 schedule=zero_bubble",
        "engine=offload engine.to=disk",
        "engine=offload engine.to=cpu engine.slices=4",
    ],
)
def test_every_engine_trains_the_same_adapter_to_the_bit(
    adapting: Gpipe, gpipe: Gpipe, tmp_path: Path, words: str, base: str
) -> None:
    if base:
        pytest.importorskip("bitsandbytes", reason="needs gpipe-cli[quantize]")
    adapting("run_dir=reference", "engine=single", *base.split())
    adapting("run_dir=run", *words.split(), *base.split())
    expected, trained = state(tmp_path / "reference" / LAST), state(tmp_path / "run" / LAST)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    # Resumed in the middle, on one device, it gets to the same state.
    answer = gpipe("train", "resume=run/snapshots/step-00000002", "engine=single", "--json")
    assert answer.code == 0, answer.err
    resumed = state(tmp_path / "run" / LAST)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
