"""What gpipe export format=hf writes is what from_pretrained loads, bit-equal to the snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpipe_cli.engines.state import module_state
from gpipe_cli.huggingface import transformers
from gpipe_cli.inference import export_formats
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.runs.snapshots.contents import write_snapshot
from gpipe_cli.runs.snapshots.manifest import snapshot_path
from gpipe_cli.runs.snapshots.record import TrainingRecord, versions
from gpipe_cli.sequential.deferred import load_parameters
from gpipe_cli.training.loop import Position
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import save_model, tiny_config

LM, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"


def trained_run(run: Path, directory: Path, **keys: Any) -> dict[str, torch.Tensor]:
    """A run whose snapshot holds a model of the directory with other values; returns its state_dict."""
    torch.manual_seed(5)
    model = build(str(directory), **keys)
    load_parameters([model], torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    path = snapshot_path(run, 1)
    path.parent.mkdir(parents=True)
    record = TrainingRecord(Position(1, 1.0), None, 1, 0, 1, versions(), {})
    write_snapshot(path, module_state(model), record, lambda: None)
    node = {"_target_": export_formats.TARGET, "path": str(directory), "dtype": keys.get("dtype")}
    config = {"model": node, "data": {"tokenizer": str(directory)}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return model.state_dict()


@pytest.mark.parametrize(
    ("auto", "kind", "changes", "keys"),
    [
        (LM, "LlamaConfig", {"tie_word_embeddings": True}, {"num_classes": 64}),
        (LM, "LlamaConfig", {}, {"num_classes": 64, "dtype": "bfloat16"}),
        (LM, "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}, {"num_classes": 64}),
        (CLASSIFIER, "BertConfig", {"num_labels": 5}, {"num_classes": 3, "new_head": True}),
    ],
    ids=["tied", "bfloat16", "experts", "classes"],
)
def test_from_pretrained_loads_the_bits_of_the_snapshot(
    gpipe: Gpipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    auto: str,
    kind: str,
    changes: dict[str, Any],
    keys: dict[str, Any],
) -> None:
    monkeypatch.setattr(export_formats, "MAX_SHARD", "5KB")
    directory = save_model(tmp_path / "model", auto, tiny_config(kind, **changes))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "notes.bin").write_text("not a part of the model")
    saved = trained_run(tmp_path / "run", directory, **keys)
    result = gpipe("export", "run=run", "out=new/exported", "format=hf", "--json")
    assert result.code == 0, result.err
    out = tmp_path / "new" / "exported"
    assert result.json["files"] == len(list(out.iterdir())) and len(list(out.glob("*.safetensors"))) > 1
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {
        path.name for path in out.iterdir()
    }
    assert not (out / "notes.bin").exists()
    loaded = getattr(transformers(), auto).from_pretrained(out)
    assert loaded.config.architectures == [type(loaded).__name__]
    state = loaded.state_dict()
    assert list(state) == list(saved)
    for name, tensor in saved.items():
        assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype, name
    assert [path.name for path in out.parent.glob(".exported*")] == []


def test_a_run_of_another_model_is_refused(gpipe: Gpipe, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", LM, tiny_config())
    trained_run(tmp_path / "run", directory, num_classes=64)
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    tree["model"]["_target_"] = "gpipe_cli.models.gpt.build"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    result = gpipe("export", "run=run", "out=exported", "format=hf")
    assert result.code == 2 and "only model=hf has a directory" in result.err
    assert not (tmp_path / "exported").exists()
    for words, message in (
        (["format=zip"], "format=zip: choose one of: hf, peft, safetensors"),
        (["format=hf"], "format=hf: writes a directory; give out=<directory>"),
    ):
        result = gpipe("export", "run=run", *words)
        assert result.code == 2 and message in result.err
