"""Directories that are no model, or not the one they claim to be: one line that names the file and the cure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpipe_cli.errors import ConfigError, GpipeError, RunError
from gpipe_cli.models.hf.pretrained import build
from tests.support.hugging_face_models import save_model, tiny_config

LM = "AutoModelForCausalLM"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("hf") / "llama", LM, tiny_config())


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    path = tmp_path / "copy"
    path.mkdir()
    for file in llama.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def shard(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def edit_config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **changes}))


def edit_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / INDEX).read_text())
    change(content)
    (path / INDEX).write_text(json.dumps(content))


def edit_shard(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(shard(path))
    change(tensors)
    save_file(tensors, shard(path))


def pickle_only(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def no_weights(path: Path) -> None:
    pickle_only(path)
    (path / "pytorch_model.bin").unlink()


def truncate(path: Path) -> None:
    content = shard(path).read_bytes()
    shard(path).write_bytes(content[: len(content) // 2])


def rename_tensors(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"another.{name}"] = tensors.pop(name)


def enlarge_tensor(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if "layers" in name and tensors[name].dim() == 2)
    tensors[name] = torch.zeros(7, 7)


BAD: dict[str, tuple[Callable[[Path], Any], type[GpipeError], str]] = {
    "a missing shard": (lambda path: shard(path).unlink(), RunError, f"{INDEX} names .*, which is missing"),
    "a truncated shard": (truncate, RunError, "damaged, or not a safetensors file"),
    "an empty shard": (lambda path: shard(path).write_bytes(b""), RunError, "it is too short"),
    "a shard that is a directory": (
        lambda path: (
            shard(path).rename(path / "moved"),
            (path / "model-00001-of-00002.safetensors").mkdir(),
        ),
        RunError,
        "not a regular file",
    ),
    "a shard with other names": (
        lambda path: edit_shard(path, rename_tensors),
        RunError,
        f"has no tensor .*, which {INDEX} says is in it",
    ),
    "a shard with other shapes": (
        lambda path: edit_shard(path, enlarge_tensor),
        RunError,
        r"the weights do not fit LlamaForCausalLM \(1 with another shape: .* 7x7 instead of ",
    ),
    "an index that leaves the directory": (
        lambda path: edit_index(path, lambda index: index["weight_map"].update(x="../secret.safetensors")),
        RunError,
        "not in a safetensors file in this directory",
    ),
    "an index without a map": (
        lambda path: edit_index(path, lambda index: index.pop("weight_map")),
        RunError,
        "it has no weight_map",
    ),
    "an index that is no JSON": (
        lambda path: (path / INDEX).write_text("{"),
        RunError,
        "damaged or unreadable",
    ),
    "pickled weights only": (pickle_only, RunError, r"has pickled weights only \(pytorch_model\.bin\)"),
    "no weights": (no_weights, RunError, "has no weights .* or give model.init=random"),
    "layers that the files lack": (
        lambda path: edit_config(path, num_hidden_layers=3),
        RunError,
        r"missing: model\.layers\.2\.",
    ),
    "quantized weights": (
        lambda path: edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        ConfigError,
        "its weights are quantized, so they cannot be trained; give those before quantization, with model.quantize=nf4",
    ),
    "an architecture for another task": (
        lambda path: edit_config(path, architectures=["LlamaForTokenClassification"]),
        ConfigError,
        "was saved as LlamaForTokenClassification; give model.task, one of: causal_lm",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_directory_is_refused(copy: Path, case: str) -> None:
    spoil, kind, message = BAD[case]
    spoil(copy)
    with pytest.raises(kind, match=message) as raised:
        build(str(copy), num_classes=64)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "image_classification"}, "a llama is for causal_lm or sequence_classification"),
        ({"task": "causal"}, "must be one of: seq2seq"),
        ({"init": "zeros"}, "model.init=zeros: must be one of: weights, random"),
        ({"dtype": "int8"}, "model.dtype=int8: must be one of: float32"),
        ({"new_head": True}, "is for weights of a classifier"),
        ({"num_classes": 65}, r"knows 64 tokens \(vocab_size\), and the data has 65"),
        ({"input_shape": (33,)}, "data.context=33: the model has 32 positions"),
        ({"input_shape": (3, 8, 8)}, "takes sequences of tokens, and the data has 3x8x8"),
    ],
)
def test_keys_that_do_not_fit_the_model_are_refused(llama: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(str(llama), **{"num_classes": 64, **keys})


def test_a_model_that_counts_positions_from_the_padding_token_has_fewer(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "AutoModelForMaskedLM", tiny_config("RobertaConfig"))
    build(str(path), num_classes=64, input_shape=(30,))
    with pytest.raises(ConfigError, match=r"data\.context=31: the model has 30 positions"):
        build(str(path), num_classes=64, input_shape=(31,))


def test_the_tokenizer_of_a_classifier_must_fit_too(tmp_path: Path) -> None:
    class Tokenizer:
        vocabulary = 65

    path = save_model(tmp_path / "model", "AutoModelForMaskedLM", tiny_config("BertConfig"))
    with pytest.raises(ConfigError, match=r"knows 64 tokens .*, and the data has 65"):
        build(str(path), task="sequence_classification", num_classes=2, tokenizer=Tokenizer())


def test_bytes_for_a_model_with_a_tokenizer_are_warned_of(copy: Path) -> None:
    class Bytes:
        vocabulary, digest = 64, "bytes"

    lines: list[str] = []
    build(str(copy), num_classes=64, tokenizer=Bytes(), say=lines.append)
    assert not lines
    (copy / "tokenizer.json").write_text("{}")
    build(str(copy), num_classes=64, tokenizer=Bytes(), say=lines.append)
    assert len(lines) == 1 and f"give data.tokenizer={copy}" in lines[0]


def test_texts_do_not_have_what_seq2seq_and_masked_models_learn(tmp_path: Path) -> None:
    class Tokenizer:
        vocabulary = 64

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    t5 = save_model(tmp_path / "t5", "AutoModelForSeq2SeqLM", tiny_config("T5Config", **sizes))
    with pytest.raises(ConfigError, match=r"model\.task=seq2seq: .* have no input for the decoder"):
        build(str(t5), num_classes=64, tokenizer=Tokenizer())
    build(str(t5), num_classes=64)
    bert, lines = (
        save_model(tmp_path / "bert", "AutoModelForMaskedLM", tiny_config("BertConfig")),
        list[str](),
    )
    build(str(bert), num_classes=64, tokenizer=Tokenizer(), say=lines.append)
    assert len(lines) == 1 and "ask for the next token, which this model sees" in lines[0]
