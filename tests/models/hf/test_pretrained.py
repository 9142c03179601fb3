"""A model that is built from a directory is that of `from_pretrained`, to the bit, and reads only what it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.sequential import to_sequential
from gpipe_cli.sequential.deferred import DeferredParameter, load_parameters
from gpipe_cli.tensor_files.tensor_file import TensorFile
from tests.support.hugging_face_models import save_model, tiny_config

CPU = torch.device("cpu")
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LM, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
MASKED, IMAGES, SEQ2SEQ = "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModelForSeq2SeqLM"
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
IMAGE = {"image_size": 32, "patch_size": 8}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (LM, "LlamaConfig", {}),
    "llama, tied": (LM, "LlamaConfig", {"tie_word_embeddings": True}),
    "gpt2: tied, transposed": (LM, "GPT2Config", GPT),
    "mixtral: experts are stacked": (LM, "MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen2 moe": (LM, "Qwen2MoeConfig", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 8}),
    "gpt neox": (LM, "GPTNeoXConfig", {}),
    "phi3": (LM, "Phi3Config", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "codegen: a table of sines per layer": (
        LM,
        "CodeGenConfig",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "gpt neo: a mask per layer": (
        LM,
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    "opt": (LM, "OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "bert": (MASKED, "BertConfig", {}),
    "bert classifier": (CLASSIFIER, "BertConfig", {"num_labels": 5}),
    "albert: one layer for all": (MASKED, "AlbertConfig", {"embedding_size": 8}),
    "vit": (IMAGES, "ViTConfig", IMAGE),
    "convnext": (IMAGES, "ConvNextConfig", {"hidden_sizes": [8] * 4, "depths": [1] * 4}),
    "resnet: buffers": (
        IMAGES,
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4},
    ),
    "t5": (
        SEQ2SEQ,
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    ),
    "bart": (
        SEQ2SEQ,
        "BartConfig",
        {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_that_of_from_pretrained(tmp_path: Path, case: str) -> None:
    auto, kind, changes = CASES[case]
    path = save_model(tmp_path / "model", auto, tiny_config(kind, **changes), "5KB")
    expected = getattr(transformers(), auto).from_pretrained(path, dtype=torch.float32)
    lines: list[str] = []
    model = build(
        str(path),
        input_shape=(3, 32, 32) if auto == IMAGES else (16,),
        num_classes=expected.config.num_labels if auto in (IMAGES, CLASSIFIER) else 64,
        router_loss=0,
        say=lines.append,
    )
    assert all(isinstance(parameter, DeferredParameter) for parameter in model.parameters())
    load_parameters([model], CPU)
    assert not lines and model.training
    before, after = expected.state_dict(), model.state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
    # Tied parameters have one name here.
    assert [name for name, _ in expected.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(map(torch.equal, expected.buffers(), model.buffers()))


def test_a_partition_reads_only_its_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = save_model(tmp_path / "llama", LM, tiny_config())
    model: Any = build(str(llama), num_classes=64)
    read: list[str] = []
    plain = TensorFile.read

    def watched(file: TensorFile, name: str) -> torch.Tensor:
        read.append(name)
        return plain(file, name)

    monkeypatch.setattr(TensorFile, "read", watched)
    load_parameters([model.model.layers[1]], CPU)
    assert read and all(name.startswith("model.layers.1.") for name in read)
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    again = len(read)
    load_parameters([model], CPU)
    assert not any(name.startswith("model.layers.1.") for name in read[again:])


def test_the_dtype_is_float32_unless_another_is_asked_for(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", LM, tiny_config(dtype="bfloat16"))
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        model = build(str(path), dtype=dtype, num_classes=64)
        load_parameters([model], CPU)
        reference = transformers().AutoModelForCausalLM.from_pretrained(path, dtype=expected)
        assert all(map(torch.equal, reference.parameters(), model.parameters()))
        assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_a_configuration_that_asks_for_checkpoints_is_told_what_replaces_them(tmp_path: Path) -> None:
    save_model(tmp_path, LM, tiny_config())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gradient_checkpointing": True}))
    said: list[str] = []
    model = build(str(tmp_path), num_classes=64, say=said.append)
    assert said == [f"model.path={tmp_path}: checkpoint= replaces gradient_checkpointing of config.json"]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_directory_with_a_configuration_alone_can_be_trained_from_scratch(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    torch.manual_seed(3)
    model: Any = build(str(tmp_path), init="random", num_classes=64)
    torch.manual_seed(3)
    expected = transformers().AutoModelForCausalLM.from_config(tiny_config())
    assert all(map(torch.equal, expected.parameters(), model.parameters()))
    assert not model.config.use_cache


def test_a_base_model_gets_a_head_for_the_task_from_the_seed(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", MASKED, tiny_config("BertConfig"))
    heads, lines = [], list[str]()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model: Any = build(str(path), task="sequence_classification", num_classes=3, say=lines.append)
        load_parameters([model], CPU)
        heads.append(model.classifier.weight)
    assert heads[0].shape == (3, 16)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert "has no values for bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias" in lines[0]
    assert "does not use cls.predictions" in lines[1]


def test_a_head_of_another_size_is_replaced_only_if_asked_for(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", CLASSIFIER, tiny_config("BertConfig", num_labels=5))
    with pytest.raises(ConfigError, match=r"another size \(classifier\.bias 5 instead of 3.*new_head=true"):
        build(str(path), num_classes=3)
    for classes in (3, 5):  # of the same size too: its classes mean something else
        model: Any = build(str(path), num_classes=classes, new_head=True)
        load_parameters([model], CPU)
        stored = transformers().AutoModelForSequenceClassification.from_pretrained(path)
        assert model.classifier.weight.shape == (classes, 16) and model.classifier.bias.eq(0).all()
        assert torch.equal(
            model.bert.embeddings.word_embeddings.weight, stored.bert.embeddings.word_embeddings.weight
        )


@pytest.mark.parametrize("kind", ["GPT2Config", "LlamaConfig"])
def test_a_classifier_without_a_pad_token_is_refused_with_what_to_set(tmp_path: Path, kind: str) -> None:
    """Tracing ran two rows where the sample had one, and the error spoke of one."""
    path = save_model(tmp_path, "AutoModelForSequenceClassification", tiny_config(kind))
    model = build(str(path), num_classes=2)
    message = (
        r"Classification does not accept an input of shape 2x8 in training: .*padding token.*; set pad_t"
    )
    with pytest.raises(ConfigError, match=message):
        to_sequential(model, torch.ones(1, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "attention", "message"),
    [
        ("LlamaConfig", "spda", r"model\.attention=spda: did you mean 'sdpa'"),
        ("LlamaConfig", "flex_attention", r"hands a BlockMask .* give model\.attention=sdpa"),
        ("LlamaConfig", "flash_attention_2", r"runs on accelerators only, .* give model\.attention=sdpa"),
        ("GptOssConfig", "sdpa", r"a GptOssForCausalLM computes its own; give model\.attention=eager"),
    ],
)
def test_an_attention_that_cannot_run_is_refused_before_the_model_is_built(
    tmp_path: Path, kind: str, attention: str, message: str
) -> None:
    tiny_config(kind).save_pretrained(tmp_path)  # without weights
    with pytest.raises(ConfigError, match=message):
        build(str(tmp_path), attention=attention, num_classes=64)


def test_the_attention_that_the_key_names_is_used(tmp_path: Path) -> None:
    tiny_config("LlamaConfig").save_pretrained(tmp_path)
    for attention, used in ((None, "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")):
        model: Any = build(str(tmp_path), init="random", attention=attention, num_classes=64)
        assert model.model.layers[0].self_attn.config._attn_implementation == used
