"""Linear layers of four bits per weight: the values of bitsandbytes, in a layer of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import import_package, transformers
from gpipe_cli.models.hf.nf4 import Nf4Linear, dequantized, quantize_frozen, quantized
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.sequential.deferred import DeferredParameter, load_parameters
from tests.support.hugging_face_models import save_model, tiny_config

pytest.importorskip("bitsandbytes", reason="needs gpipe-cli[quantize]")
LORA = {"rank": 2, "targets": ["q_proj", "v_proj"]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def bitsandbytes() -> Any:
    return import_package("bitsandbytes")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "AutoModelForCausalLM", tiny_config())


def frozen_linear(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=dtype).requires_grad_(False)


def quantized_layers(model: nn.Module) -> set[str]:
    return {name for name, part in model.named_modules() if isinstance(part, Nf4Linear)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 64), (7, 24), (3, 5), (1, 2), (1025, 1030)], ids=str)
def test_weights_have_the_values_of_bitsandbytes(
    shape: tuple[int, int], dtype: torch.dtype, bitsandbytes: Any
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    weight[0, :2] = 0
    packed = quantized(weight)
    assert packed.nbytes <= weight.numel() / 2 + 4 * (weight.numel() / 64 + 2)
    codes, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = bitsandbytes.functional.dequantize_4bit(codes, state)
    assert torch.equal(dequantized(packed, shape, dtype), expected.view(shape))


def test_a_block_of_zeros_stays_zero() -> None:
    assert not dequantized(quantized(torch.zeros(2, 64)), (2, 64), torch.float32).any()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_layer_computes_with_the_dequantized_weights_and_saves_only_the_packed_ones(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(frozen_linear(24, 16, dtype))
    weight, bias = model[0].weight, model[0].bias
    quantize_frozen(model)
    layer: Any = model[0]
    saved: list[Tensor] = []
    inputs = [torch.randn(2, 3, 16, dtype=dtype, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        output = layer(inputs[0])
    assert len(saved) == 1 and saved[0] is layer.packed
    expected = linear(inputs[1], dequantized(quantized(weight), (24, 16), dtype), bias)
    assert torch.equal(output, expected)
    for result in (output, expected):
        result.sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert list(layer.state_dict()) == ["bias", "packed"] and not hasattr(layer, "weight")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_layer_runs_without_values_in_every_dtype(dtype: torch.dtype) -> None:
    """float64 failed there, so a trace, which uses it once, ran every layer with values: 500 MB for a model of 1 GB."""
    model = nn.Sequential(frozen_linear(24, 16)).to("meta")
    quantize_frozen(model)
    output = model(torch.empty(2, 16, dtype=dtype, device="meta"))
    assert output.is_meta and output.dtype == dtype and output.shape == (2, 24)


def test_autocast_decides_the_precision_as_for_a_linear_layer() -> None:
    model = nn.Sequential(frozen_linear(8, 16))
    quantize_frozen(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.ones(1, 16, requires_grad=True))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()


def test_the_base_has_four_bits_except_for_the_head_and_stays_in_its_files(directory: Path) -> None:
    lines: list[str] = []
    model = build(str(directory), quantize="nf4", lora=LORA, say=lines.append)
    assert quantized_layers(model) == {
        f"model.layers.{layer}.{path}"
        for layer in range(2)
        for path in (
            *(
                "self_attn.q_proj.base_layer",
                "self_attn.v_proj.base_layer",
                "self_attn.k_proj",
                "self_attn.o_proj",
            ),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
    }
    assert lines == ["model.quantize=nf4: the weights of 14 linear layers take 2.82KiB instead of 10KiB"]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DeferredParameter) is ("lora_" not in name)
        expected = torch.float32 if "lora_" in name else torch.uint8 if "packed" in name else torch.bfloat16
        assert parameter.dtype == expected, name


def test_logits_and_gradients_are_those_of_transformers_with_bitsandbytes(directory: Path) -> None:
    settings = transformers().BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    theirs = transformers().AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    ours = build(str(directory), quantize="nf4", lora=LORA)
    load_parameters([ours], torch.device("cpu"))
    embedded = [torch.randn(2, 5, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    embedded[1].data.copy_(embedded[0])
    # In train mode: on some CPUs evaluation replaces the weights of bitsandbytes' layer by rounded ones.
    logits = [
        model.train()(inputs_embeds=each).logits for model, each in zip((theirs, ours), embedded, strict=True)
    ]
    assert torch.equal(*logits)
    for each in logits:
        each.sum().backward()
    assert torch.equal(embedded[0].grad, embedded[1].grad)


def test_statistics_count_weights_their_bytes_and_operations_and_save_no_dequantized_ones() -> None:
    def stats(dtype: torch.dtype) -> ModelStats:
        model = nn.Sequential(*(frozen_linear(64, 64, dtype) for _ in range(2)))
        if dtype == torch.bfloat16:
            quantize_frozen(model)
        sample = Sample(torch.randn(8, 64, dtype=dtype, requires_grad=True))
        return model_stats(model, sample)

    packed, plain = stats(torch.bfloat16), stats(torch.float32)
    for own, other, layer in zip(packed.operations, plain.operations, packed.layers, strict=True):
        assert own.forward_flops == other.forward_flops > 0 and own.backward_flops == other.backward_flops > 0
        assert layer.parameters == 64 * 64 + 64
        assert layer.parameter_bytes == 64 * 64 // 2 + 64 * 4 + 64 * 2 and layer.saved_bytes == 0
        # The product reads dequantized weights, however many rows the micro-batch has.
        product = next(kernel for kernel in own.forward if kernel.flops)
        assert product.weight_bytes >= 64 * 64 * 2 and product.activation_bytes == 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("kind", "sizes", "auto", "left"),
    [
        ("GPT2Config", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "CausalLM", {"lm_head"}),
        ("LlamaConfig", {"tie_word_embeddings": True}, "CausalLM", {"lm_head"}),
        ("LlamaConfig", {"pad_token_id": 0}, "SequenceClassification", {"score"}),
        # T5 reads the dtype of these weights.
        (
            "T5Config",
            {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1},
            "Seq2SeqLM",
            {"wo", "lm_head"},
        ),
    ],
    ids=["gpt2", "llama", "classifier", "t5"],
)
def test_heads_and_weights_that_others_use_stay_as_they_are(
    kind: str, sizes: dict[str, Any], auto: str, left: set[str], tmp_path: Path
) -> None:
    path = save_model(tmp_path, f"AutoModelFor{auto}", tiny_config(kind, **sizes))
    model = build(str(path), quantize="nf4", lora={"rank": 2}, dtype="float32")
    plain = build(str(path), lora={"rank": 2})
    linear_layers = {
        name.removesuffix(".base_layer")
        for name, part in plain.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    }
    chosen = {name.removesuffix(".base_layer") for name in quantized_layers(model)}
    assert {name.rpartition(".")[2] for name in linear_layers - chosen if "lora_" not in name} == left
    load_parameters([model, plain], torch.device("cpu"))
    for name in quantized_layers(model):
        layer: Any = model.get_submodule(name)
        weight = plain.get_submodule(name).weight
        weight = weight.t() if type(plain.get_submodule(name)).__name__ == "Conv1D" else weight
        assert torch.equal(layer.packed, quantized(weight.detach()))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantize": "int8", "lora": LORA}, r"model\.quantize=int8: must be nf4, or null"),
        (
            {"quantize": "nf4"},
            r"model\.quantize=nf4: weights of four bits cannot be trained; give model\.lora\.rank",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(directory: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(str(directory), **keys)


def test_a_model_without_frozen_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no frozen linear layer; remove model\.quantize"):
        quantize_frozen(nn.Sequential(nn.Linear(2, 2)))


def test_a_missing_bitsandbytes_is_one_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    import_package.cache_clear()
    with pytest.raises(
        ConfigError, match=r"^bitsandbytes cannot be imported \(.*\); install it: pip install bits"
    ):
        build(str(directory), quantize="nf4", lora=LORA)
    import_package.cache_clear()
