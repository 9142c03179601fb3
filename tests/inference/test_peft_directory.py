from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from gpipe_cli.engines.state import module_state
from gpipe_cli.huggingface import import_package, transformers
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.runs.snapshots.contents import write_snapshot
from gpipe_cli.runs.snapshots.manifest import snapshot_path
from gpipe_cli.runs.snapshots.record import BaseFiles, TrainingRecord, digest_files, versions
from gpipe_cli.sequential.deferred import DeferredParameter, load_parameters
from gpipe_cli.training.loop import Position
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import save_model, tiny_config

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}


def save_run(run: Path, node: dict[str, Any], **built: Any) -> nn.Module:
    """A run with one snapshot of an adapted model whose trained parameters are all random; returns the model."""
    torch.manual_seed(0)
    model = build(**{key: value for key, value in node.items() if key != "_target_"}, **built)
    frozen = {
        name
        for name, parameter in model.state_dict(keep_vars=True).items()
        if isinstance(parameter, DeferredParameter) and not parameter.requires_grad
    }
    load_parameters([model], torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    base = _base(Path(node["path"])) if frozen else None
    record = TrainingRecord(Position(1, 1.0), None, 1, 0, 1, versions(), {}, base)
    path = snapshot_path(run, 1)
    path.parent.mkdir(parents=True)
    write_snapshot(path, module_state(model, frozen), record, lambda: None)
    OmegaConf.save(
        {"model": {"_target_": "gpipe_cli.models.hf.pretrained.build", **node}, "data": {}},
        run / "config.yaml",
    )
    return model.eval()


def _base(directory: Path) -> BaseFiles:
    return digest_files(directory, [path.name for path in directory.glob("*.safetensors")])


@pytest.mark.parametrize(
    ("kind", "sizes", "auto", "keys", "saved"),
    [
        ("LlamaConfig", {}, "CausalLM", {"lora": {"rank": 2, "targets": ["q_proj"]}}, None),
        ("LlamaConfig", {}, "CausalLM", {"lora": {"rank": 2, "alpha": 3}, "dtype": "float16"}, None),
        ("LlamaConfig", {}, "CausalLM", {"lora": {"rank": 2, "targets": ["embed_tokens", "lm_head"]}}, None),
        ("GPT2Config", GPT2, "CausalLM", {"lora": {"rank": 2, "targets": "all-linear"}}, None),
        (
            "T5Config",
            {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16},
            "Seq2SeqLM",
            {"lora": {"rank": 2}},
            None,
        ),
        ("BertConfig", {}, "SequenceClassification", {"lora": {"rank": 2}}, ["classifier"]),
        ("LlamaConfig", {"pad_token_id": 0}, "SequenceClassification", {"lora": {"rank": 2}}, ["score"]),
        (
            "RobertaConfig",
            {"max_position_embeddings": 34},  # two of them are not for tokens
            "SequenceClassification",
            {"lora": {"rank": 2}, "new_head": True},
            ["classifier"],
        ),
    ],
    ids=str,
)
def test_peft_loads_what_is_exported_to_the_bit(
    kind: str,
    sizes: dict[str, Any],
    auto: str,
    keys: dict[str, Any],
    saved: list[str] | None,
    gpipe: Gpipe,
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path / "base", f"AutoModelFor{auto}", tiny_config(kind, **sizes))
    model = save_run(tmp_path / "run", {"path": str(base), **keys})
    summary = gpipe("export", "run=run", "out=adapter", "format=peft", "--json").json
    assert summary["base"] == str(base)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base) and written["modules_to_save"] == saved
    dtype = torch.float16 if keys.get("dtype") else torch.float32
    plain = getattr(transformers(), f"AutoModelFor{auto}").from_pretrained(base, dtype=dtype)
    adapted = import_package("peft").PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    tokens = torch.randint(1, 64, (2, 6))
    inputs: dict[str, Tensor] = {"input_ids": tokens} | (
        {"decoder_input_ids": tokens} if auto == "Seq2SeqLM" else {}
    )
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(adapted(**inputs).logits, expected)
        with adapted.disable_adapter():
            assert not torch.equal(adapted(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("kind", "auto", "keys", "tolerance"),
    [
        ("LlamaConfig", "CausalLM", {"lora": {"rank": 2, "targets": "all-linear"}}, 1e-4),
        ("LlamaConfig", "CausalLM", {"lora": {"rank": 2}, "dtype": "bfloat16"}, 0.05),
        ("BertConfig", "SequenceClassification", {"lora": {"rank": 2}}, 1e-4),
    ],
    ids=str,
)
def test_a_merged_model_has_the_scores_of_the_adapted_one(
    kind: str, auto: str, keys: dict[str, Any], tolerance: float, gpipe: Gpipe, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", f"AutoModelFor{auto}", tiny_config(kind))
    model = save_run(tmp_path / "run", {"path": str(base), **keys})
    answer = gpipe("export", "run=run", "out=merged", "merge=true", "--json")
    assert answer.code == 0 and answer.json["files"] >= 2, answer.err
    dtype = getattr(torch, keys.get("dtype", "float32"))
    merged = getattr(transformers(), f"AutoModelFor{auto}").from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == dtype and not any("lora" in name for name in merged.state_dict())
    tokens = torch.randint(1, 64, (2, 6))
    with torch.no_grad():
        expected, found = (each.eval()(input_ids=tokens).logits.float() for each in (model, merged))
    assert (found - expected).norm() < tolerance * expected.norm()


def test_only_a_whole_run_of_adapters_is_merged(gpipe: Gpipe, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "AutoModelForCausalLM", tiny_config())
    save_run(tmp_path / "whole", {"path": str(base), "lora": {"rank": None}})
    for words, message in (
        (
            ["out=merged"],
            "whole has no adapter of a base model in files (model.lora.rank); give format=hf",
        ),
        ([], "merge=true: writes a directory; give out=<directory>"),
        (
            ["out=merged", "format=peft"],
            "merge=true: writes the whole model, and format=peft only its adapter",
        ),
    ):
        answer = gpipe("export", "run=whole", "merge=true", *words)
        assert answer.code == 2 and message in answer.err and answer.err.count("\n") == 1


def test_an_adapter_of_a_base_in_four_bits_is_one_for_bitsandbytes(gpipe: Gpipe, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs gpipe-cli[quantize]")
    base = save_model(tmp_path / "base", "AutoModelForCausalLM", tiny_config())
    node = {"path": str(base), "lora": {"rank": 2}, "quantize": "nf4", "dtype": "float32"}
    model = save_run(tmp_path / "run", node)
    assert gpipe("export", "run=run", "out=adapter", "format=peft").code == 0
    settings = transformers().BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    plain = transformers().AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    adapted = import_package("peft").PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    embedded = torch.randn(2, 6, 16, requires_grad=True)
    # In train mode: on some CPUs evaluation replaces the weights of bitsandbytes' layer by rounded ones.
    assert torch.equal(adapted.train()(inputs_embeds=embedded).logits, model(inputs_embeds=embedded).logits)


def test_other_formats_and_other_runs_are_refused_with_the_cure(gpipe: Gpipe, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "AutoModelForCausalLM", tiny_config())
    save_run(tmp_path / "run", {"path": str(base), "lora": {"rank": 2}})
    save_run(tmp_path / "whole", {"path": str(base), "lora": {"rank": None}})
    for format in ("hf", "safetensors"):
        answer = gpipe("export", "run=run", "out=written", f"format={format}")
        assert answer.code == 2 and "give format=peft" in answer.err
    answer = gpipe("export", "run=whole", "out=written", "format=peft")
    assert (
        answer.code == 2
        and "has no adapter of a base model in files (model.lora.rank); give format=hf" in answer.err
    )
    (base / "model.safetensors.index.json").unlink()
    for file in base.glob("*.safetensors"):
        file.write_bytes(b"")
    answer = gpipe("export", "run=run", "out=written", "format=peft")
    assert answer.code == 4 and "was trained on another base model" in answer.err
    assert not (tmp_path / "written").exists()
