"""Mixtures of experts: they train in every dtype, and their auxiliary loss counts as transformers counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.build.layer_check import meta_output
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.sequential import to_sequential
from tests.support.hugging_face_models import tiny_config

EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
STACKED = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
    "Qwen2Moe": {**STACKED, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {**STACKED, "head_dim": 8},
    "Olmoe": STACKED,
    "GraniteMoe": {**EXPERTS, "num_local_experts": 4},
    "GptOss": {**EXPERTS, "num_local_experts": 4, "head_dim": 8},
}
IDS = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))


def saved(path: Path, name: str, **changes: Any) -> str:
    tiny_config(f"{name}Config", **{**MODELS[name], **changes}).save_pretrained(path)
    return str(path)


def built(path: str, **keys: Any) -> Any:
    torch.manual_seed(0)
    return build(path, init="random", num_classes=64, input_shape=(12,), **keys)


def of_transformers(name: str, path: str) -> Any:
    torch.manual_seed(0)
    chosen = getattr(transformers(), f"{name}ForCausalLM")
    return chosen._from_config(getattr(transformers(), f"{name}Config").from_pretrained(path))


@pytest.mark.parametrize(
    "name", ["Mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:])]
)
def test_the_auxiliary_loss_has_the_value_and_the_gradients_of_transformers(
    tmp_path: Path, name: str
) -> None:
    path = saved(tmp_path, name, output_router_logits=True)
    weight = 0.5
    sequence = to_sequential(built(path, router_loss=weight), IDS)
    loss = TokenCrossEntropy()
    with GPipe(sequence, [2, len(sequence) - 3, 1], chunks=2, checkpoint="always") as pipe:
        total = pipe.step(IDS, IDS.roll(-1, 1), loss)

    model = of_transformers(name, path)
    expected = torch.zeros(())
    for part in IDS.chunk(2):
        output = model(part, output_router_logits=True, use_cache=False)
        mean = (loss(output.logits, part.roll(-1, 1)) + weight * output.aux_loss) / 2
        mean.backward()
        expected += mean.detach()
    assert torch.equal(total, expected)
    mine = {key: parameter.grad for key, parameter in pipe.named_parameters()}
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert mine.keys() == gradients.keys()
    for key, gradient in gradients.items():
        own = mine[key]
        assert own is not None and torch.equal(own, gradient), key

    model.router_aux_loss_coef = weight
    own_loss = model(IDS, labels=IDS, shift_labels=IDS.roll(-1, 1), use_cache=False).loss
    torch.testing.assert_close(loss(sequence(IDS), IDS.roll(-1, 1)), own_loss)


def test_the_weight_is_that_of_the_directory_and_a_line_says_if_it_does_not_count(tmp_path: Path) -> None:
    counted = built(saved(tmp_path / "counted", "Mixtral", output_router_logits=True))
    assert counted(IDS)["auxiliary_loss"].shape == (4,)
    assert counted.auxiliary_loss == counted.config.router_aux_loss_coef == 0.001
    lines: list[str] = []
    path = saved(tmp_path / "uncounted", "Mixtral")
    assert built(path, say=lines.append)(IDS).aux_loss is None
    assert lines == [
        "model.router_loss=null: the auxiliary loss of the experts does not count, because config.json has "
        "output_router_logits=false; model.router_loss=0.001 counts it with the weight in config.json"
    ]
    off = built(str(tmp_path / "counted"), router_loss=0, say=lines.append)
    assert off(IDS).aux_loss is None and len(lines) == 1


def test_an_auxiliary_loss_that_gpipe_cannot_add_is_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_sparse_encoder_layers": 1}
    config = tiny_config("SwitchTransformersConfig", **sizes, num_experts=2, output_router_logits=True)
    config.save_pretrained(tmp_path / "switch")
    with pytest.raises(
        ConfigError, match=r"has output_router_logits=true, but gpipe adds .*; give model\.router_loss=0 to"
    ):
        built(str(tmp_path / "switch"))
    tiny_config().save_pretrained(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"model\.router_loss=0\.1: gpipe adds no .* for a LlamaForCausal"):
        built(str(tmp_path / "llama"), router_loss=0.1)
    with pytest.raises(ConfigError, match=r"model\.router_loss=-1: must be a finite number of at least 0"):
        built(str(tmp_path / "llama"), router_loss=-1)


def test_experts_in_float32_are_measured_without_values(tmp_path: Path) -> None:
    """torch computes them without values in bfloat16 only, so all other dtypes were refused before the first step."""
    sequence = to_sequential(built(saved(tmp_path, "Olmoe")), IDS)
    assert meta_output(sequence, IDS)[0].shape == (4, 12, 64)
    operations = model_stats(sequence, Sample(IDS, IDS, TokenCrossEntropy())).operations
    counted = [kernel.flops for layer in operations for kernel in layer.forward if "grouped" in kernel.name]
    # Each token takes two experts, and each of them multiplies by weights of [64, 16] and [16, 32].
    assert sum(counted) == 2 * 2 * IDS.numel() * 2 * (64 * 16 + 16 * 32)


class CountsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)
        self.more = nn.Linear(3, 2)

    def forward(self, input: Tensor) -> Tensor:
        scores = self.scores(input)
        counts = torch.bincount(scores.argmax(-1), minlength=self.most)
        return self.more(scores * (counts[:3] / float(len(input))))

    most = 3


def test_a_count_of_values_is_traced_and_checked_when_it_runs() -> None:
    torch.manual_seed(0)
    model = CountsValues()
    sequence = to_sequential(model, torch.randn(2, 4))
    for rows in (1, 7):
        input = torch.randn(rows, 4)
        assert torch.equal(sequence(input), model(input))
    model.most = 1
    with pytest.raises((RuntimeError, ConfigError), match="bincount with minlength=1 got the value"):
        to_sequential(model, torch.randn(64, 4))(torch.randn(64, 4))
