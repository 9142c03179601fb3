"""Documents in one sample do not see each other: outputs and gradients are those of each document alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpipe_cli.build.fit import check_isolation
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.model import _check_positions, make_model
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.transforms import Transforms
from gpipe_cli.engines import single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.models.gpt import build as build_gpt
from gpipe_cli.profiling.records import Sample
from gpipe_cli.sequential import to_sequential
from tests.engines.test_frozen import CPU, objective, values
from tests.support.hugging_face_models import tiny_config

LENGTHS = (5, 1, 6)
TOKENS = sum(LENGTHS)
VOCABULARY = 64
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
"""Sums of float32 are in another order where a mask hides something."""


def packed(rows: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    return {
        "input_ids": torch.randint(VOCABULARY, (rows, TOKENS)),
        "position_ids": places.repeat(rows, 1),
    }


def hugging_face(kind: str, attention: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = tiny_config(f"{kind}Config", use_cache=False, **sizes)
        config._attn_implementation = attention
        name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        model: nn.Module = getattr(transformers(), name)._from_config(config)
        return model

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: build_gpt(16, 2, 2, num_classes=VOCABULARY, input_shape=(TOKENS,)),
    "llama": hugging_face("Llama", "sdpa"),
    "llama, eager": hugging_face("Llama", "eager"),
    "gpt2": hugging_face("GPT2", "sdpa", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mistral, sliding window": hugging_face("Mistral", "sdpa", sliding_window=3, num_key_value_heads=1),
}


def sequence(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model if isinstance(model, nn.Sequential) else to_sequential(model, packed())


def scores(model: nn.Sequential, input: dict[str, Tensor]) -> Tensor:
    output = model(input)
    found: Tensor = getattr(output, "logits", output)
    return found


def gradients(model: nn.Sequential) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_scores_and_gradients_are_those_of_each_document_alone(name: str) -> None:
    together, alone = sequence(name), sequence(name)
    input = packed()
    target = torch.randint(VOCABULARY, (2, TOKENS))
    whole = scores(together, input)
    cross_entropy(whole.flatten(0, 1), target.flatten(), reduction="sum").backward()
    for of_document, labels, *parts in zip(
        whole.split(LENGTHS, 1),
        target.split(LENGTHS, 1),
        *(each.split(LENGTHS, 1) for each in input.values()),
        strict=True,
    ):
        found = scores(alone, dict(zip(input, parts, strict=True)))
        torch.testing.assert_close(found, of_document, **CLOSE)
        cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = gradients(alone)
    assert len(expected) == len(gradients(together)) == len([*alone.parameters()])
    for mine, theirs in zip(gradients(together), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def engine(name: str, layers: list[int] | None = None, folder: Path = Path()) -> Engine:
    module = sequence(name)
    task = objective(loss=TokenCrossEntropy())
    target = packed()["input_ids"]
    spec = EngineSpec(
        module,
        task,
        layers or [len(module)],
        [CPU] * len(layers or [0]),
        chunks=3,
        eval_chunks=1,
        checkpoint="never" if layers is None else "always",
        deferred_batch_norm=False,
        scratch=folder,
        referenced=frozenset(),
        make_sample=lambda: Sample(packed(), target, task.loss),
    )
    return single.build(spec) if layers is None else threads.build(spec)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_partitions_train_on_packed_documents_with_the_bits_of_one(name: str) -> None:
    """A sample of a single document is among them: the model would skip the mask that tells documents apart."""
    input = packed(6)
    input["position_ids"][0] = torch.arange(TOKENS)
    layers = len(sequence(name))
    with closing(engine(name)) as reference, closing(engine(name, [2, 1, layers - 3])) as split:
        for step in range(2):
            batch = (input, input["input_ids"].roll(step))
            mine, theirs = (each.train_step(batch, key=step, lr=0.1) for each in (split, reference))
            assert mine.loss == theirs.loss
        mine, theirs = values(split.state()), values(reference.state())
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def data() -> Data:
    samples = [({key: value[0] for key, value in packed().items()}, torch.zeros(TOKENS))]
    return Data(samples, samples, classes=VOCABULARY, shape=(TOKENS,))


def test_a_model_that_ignores_where_documents_begin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon takes positions, but its mask does not depend on them."""
    monkeypatch.setitem(MODELS, "falcon", hugging_face("Falcon", "sdpa"))
    for name in ("gpt", "llama"):
        with closing(engine(name)) as right:
            check_isolation(right, data())
    with (
        closing(engine("falcon")) as wrong,
        pytest.raises(
            ConfigError, match=r"data\.pack=true: this model lets a document see the one before it"
        ),
    ):
        check_isolation(wrong, data())


def test_a_model_without_positions_is_refused_before_it_is_traced(tmp_path: Path) -> None:
    tiny_config("BloomConfig", n_layer=1, n_head=2).save_pretrained(tmp_path)
    node = {"_target_": "gpipe_cli.models.hf.pretrained.build", "path": str(tmp_path), "init": "random"}
    loader = BatchLoader(data(), Transforms(None, None), VOCABULARY, batch_size=1, seed=0)
    with pytest.raises(ConfigError, match=r"BloomForCausalLM takes no position_ids, .* data\.pack=joined"):
        make_model(ModelConfig(model={**node, "task": "causal_lm"}), loader)


def test_chunks_of_attention_that_documents_would_shift_are_refused() -> None:
    """Llama 4 counts its chunks from the first token of a sample, whatever the positions are."""
    model = transformers().Llama4ForCausalLM(
        tiny_config(
            "Llama4TextConfig",
            attention_chunk_size=8,
            head_dim=8,
            intermediate_size_mlp=32,
            num_local_experts=2,
        )
    )
    _check_positions(model, {name: values[:, :8] for name, values in packed().items()})
    with pytest.raises(ConfigError, match=r"attends within chunks of 8 tokens, .* data\.context=8 or less"):
        _check_positions(model, packed())
