from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.models.hf.lora import LoraSettings, add_adapters
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.sequential.deferred import DeferredParameter, load_parameters
from tests.support.hugging_face_models import save_model, tiny_config


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "AutoModelForCausalLM", tiny_config())


def adapted(directory: Path, seed: int = 0, **lora: Any) -> nn.Module:
    torch.manual_seed(seed)
    return build(str(directory), lora={"rank": 2, "targets": ["q_proj", "v_proj"], **lora})


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapters_are_trained_and_the_base_stays_in_its_files(directory: Path) -> None:
    model = adapted(directory)
    assert set(trained(model)) == {
        f"model.layers.{layer}.self_attn.{target}.lora_{matrix}.default.weight"
        for layer in range(2)
        for target in ("q_proj", "v_proj")
        for matrix in "AB"
    }
    base = {name: parameter for name, parameter in model.named_parameters() if "lora_" not in name}
    assert all(isinstance(parameter, DeferredParameter) for parameter in base.values())
    # An adapted layer keeps its name but for `.base_layer`.
    names = {name for name, _ in build(str(directory)).named_parameters()}
    assert {name.replace(".base_layer", "") for name in base} == names


def test_adapters_come_from_the_seed_and_change_nothing_at_first(directory: Path) -> None:
    models = [adapted(directory, seed).eval() for seed in (0, 0, 1)]
    first, same, other = (trained(model) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    plain, tokens = build(str(directory)).eval(), torch.randint(64, (2, 5))
    for model in (models[0], plain):
        load_parameters([model], torch.device("cpu"))
    assert torch.equal(models[0](tokens).logits, plain(tokens).logits)


def test_adapters_of_a_base_in_half_precision_are_trained_in_single(directory: Path) -> None:
    torch.manual_seed(0)
    model = build(str(directory), dtype="bfloat16", lora={"rank": 2, "alpha": 3, "dropout": 0.5})
    assert {parameter.dtype for parameter in trained(model).values()} == {torch.float32}
    layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == 1.5 and layer.lora_dropout["default"].p == 0.5


def test_the_head_of_a_classifier_and_what_the_files_lack_are_trained_too(directory: Path) -> None:
    torch.manual_seed(0)
    model = build(
        str(directory), task="sequence_classification", num_classes=3, lora={"rank": 2, "targets": ["q_proj"]}
    )
    assert [name for name in trained(model) if "lora_" not in name] == ["score.weight"]


def test_layers_with_a_transposed_weight_are_adapted_without_a_warning() -> None:
    config = transformers().GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64)
    model, warnings = transformers().GPT2LMHeadModel(config), list[str]()
    add_adapters(model, LoraSettings(2, alpha=4.0), say=warnings.append)
    assert list(trained(model)) == [
        f"transformer.h.0.attn.c_attn.lora_{matrix}.default.weight" for matrix in "AB"
    ]
    assert warnings == []


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank=0: must be a whole number of at least 1"),
        ({"rank": 2, "alpha": -1}, r"model\.lora\.alpha=-1: must be a number greater than 0"),
        ({"rank": 2, "dropout": 1}, r"model\.lora\.dropout=1: must be a number from 0 to below 1"),
        ({"rank": 2, "target": ["q_proj"]}, r"model\.lora\.target: unknown key; did you mean 'targets'\?"),
        (
            {"rank": None, "targets": ["q_proj"]},
            r"model\.lora\.targets=\['q_proj'\]: needs model\.lora\.rank",
        ),
        ({"rank": 2, "targets": []}, r"model\.lora\.targets=\[\]: must be a list of names of layers"),
        (
            {"rank": 2, "targets": ["q_prj"]},
            r"targets=q_prj: the model has no layer .*; did you mean 'q_proj'\?",
        ),
        (
            {"rank": 2, "targets": ["self_attn"]},
            r"targets=self_attn: the model has no layer .*: embed_tokens, q_proj",
        ),
        (
            {"rank": 2, "targets": ["norm"]},
            r"targets=norm: the model has no layer of that name with a matrix",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(directory: Path, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(str(directory), lora=lora)


def test_without_a_rank_the_whole_model_is_trained(directory: Path) -> None:
    model = build(str(directory), lora={"rank": None, "targets": None, "alpha": None, "dropout": 0.0})
    assert all(parameter.requires_grad for parameter in model.parameters())
