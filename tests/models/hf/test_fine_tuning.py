"""Fine-tuning a Llama with gpipe gives the bits of a plain loop around transformers' forward: losses and weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpipe_cli.data.loading import batches
from gpipe_cli.data.texts import build_text_files
from gpipe_cli.huggingface import transformers
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import tiny_config

STEPS = 3
CHUNKS = 4
BATCH = 8
CONTEXT = 16
LR = 0.01
WAYS = [
    ["engine=threads", "partitions=4"],
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            ["engine=single"],
            ["engine=threads", "partitions=1"],
            ["engine=threads", "partitions=2"],
            ["engine=threads", "partitions=2", "schedule=1f1b", "checkpoint=always"],
            ["engine=threads", "partitions=4", "schedule=zero_bubble", "checkpoint=never"],
            ["engine=threads", "partitions=4", "schedule=interleaved", "devices=[cpu,cpu]"],
            ["engine=offload", "engine.slices=1"],
            ["engine=offload", "engine.slices=2"],
            ["engine=offload", "engine.slices=4", "engine.to=disk"],
            *(["engine=processes", f"partitions={partitions}"] for partitions in (1, 2, 4)),
        )
    ),
]


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = tiny_config(vocab_size=256, num_key_value_heads=1)
    path = tmp_path_factory.mktemp("fine_tuning") / "llama"
    transformers().LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(llama: Path) -> Trained:
    """What people write: accumulate the gradients of micro-batches, then step."""
    torch.set_num_threads(1)
    model = transformers().AutoModelForCausalLM.from_pretrained(llama).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    samples = build_text_files(context=CONTEXT).train
    losses = []
    for input, target in islice(batches(samples, batch_size=BATCH, seed=0, epoch=0, shuffle=True), STEPS):
        assert isinstance(input, Tensor)
        parts = []
        for tokens, labels in zip(input.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            scores = model(input_ids=tokens).logits
            parts.append(cross_entropy(scores.flatten(0, 1), labels.flatten()) / CHUNKS)
            parts[-1].backward()
        losses.append(torch.stack(parts).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, model.state_dict())


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_every_engine_and_split_gives_the_bits_of_a_plain_loop(
    words: list[str], llama: Path, plain: Trained, gpipe: Gpipe, tmp_path: Path
) -> None:
    answer = gpipe(
        "train", "model=hf", f"model.path={llama}", f"data.context={CONTEXT}", f"batch_size={BATCH}",
        f"chunks={CHUNKS}", f"steps={STEPS}", f"optimizer.lr={LR}", "optimizer.no_decay=[]",
        "lr_schedule=constant", "log.every=1",
        "threads=1", "balance=uniform", f"run_dir={tmp_path / 'run'}", *words,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["loss"] for row in rows if row["split"] == "train"] == plain.losses
    (weights,) = (tmp_path / "run" / "snapshots").glob(f"*{STEPS}/model.safetensors")
    trained = load_file(weights)
    assert trained.keys() == plain.weights.keys()
    assert [name for name, tensor in trained.items() if not torch.equal(tensor, plain.weights[name])] == []
