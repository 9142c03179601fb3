"""loss=own: a model that takes the targets and returns its own loss trains on the loss that it computes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpipe_cli import GPipe
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.build.model import make_model
from gpipe_cli.config.schema import CostConfig, ModelConfig
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.tokenizer import ByteTokenizer
from gpipe_cli.data.transforms import Transforms
from gpipe_cli.engines import single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.losses.own import OwnLoss
from gpipe_cli.profiling.records import Sample
from gpipe_cli.sequential import to_sequential
from tests.engines.test_frozen import CPU, objective, values
from tests.support.hugging_face_models import tiny_config

VOCABULARY, TOKENS = 11, 6
IDS = torch.randint(VOCABULARY, (5, TOKENS), generator=torch.Generator().manual_seed(2))
TARGETS = IDS.roll(-1, 1)


class ComputesLoss(nn.Module):
    """Like nanoGPT: without targets it returns the scores of the last position only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3)))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.blocks(self.embedding(ids))
        if targets is None:
            return self.head(hidden[:, [-1]]), None
        scores = self.head(hidden)
        return scores, cross_entropy(scores.flatten(0, 1), targets.flatten())


def sequence() -> Any:
    torch.manual_seed(0)
    return to_sequential(ComputesLoss(), (IDS, TARGETS))


def engine(balance: list[int] | None) -> Engine:
    task = objective(loss=OwnLoss(), measure=OwnLoss().measure)
    spec = EngineSpec(
        sequence(),
        task,
        balance or [len(sequence())],
        [CPU] * len(balance or [0]),
        chunks=2,
        eval_chunks=3,
        checkpoint="never" if balance is None else "always",
        deferred_batch_norm=False,
        loss_by_micro_batch=True,
        make_sample=lambda: Sample((IDS, TARGETS), TARGETS, task.loss),
    )
    return single.build(spec) if balance is None else threads.build(spec)


def test_partitions_train_and_evaluate_with_the_bits_of_one() -> None:
    batch = ((IDS, TARGETS), TARGETS)
    with closing(engine(None)) as reference, closing(engine([2, 1, len(sequence()) - 3])) as split:
        for step in range(2):
            mine, theirs = (each.train_step(batch, key=step, lr=0.1) for each in (split, reference))
            assert mine.loss == theirs.loss
        mine_state, reference_state = values(split.state()), values(reference.state())
        assert all(torch.equal(mine_state[key], reference_state[key]) for key in reference_state)
        result = split.eval_step(batch)
        assert result == reference.eval_step(batch)
        assert set(result.sums) == {"token_accuracy", "bits_per_token"}


def test_micro_batches_count_by_their_tokens_where_some_are_ignored() -> None:
    targets = TARGETS.clone()
    targets[0, 1:] = targets[4, :2] = -100
    layers = sequence().double().eval()
    with GPipe(layers, [2, len(layers) - 2], chunks=3) as pipe:
        loss = pipe.step((IDS, targets), targets, OwnLoss(mean="tokens"))
        assert pipe.step((IDS, targets), targets, OwnLoss(mean="samples")) != loss
        pipe.zero_grad()
        pipe.step((IDS, targets), targets, OwnLoss(mean="tokens"))
    model = ComputesLoss().double().eval()
    model.load_state_dict(pipe.state_dict())
    expected = model(IDS, targets)[1]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad)


def test_ignored_labels_are_refused_until_the_key_says_what_the_loss_is_a_mean_of() -> None:
    targets = TARGETS.clone()
    targets[0, 0] = -100
    with pytest.raises(
        ConfigError, match=r"loss\.mean=null: some labels are ignored .* samples, tokens, shif"
    ):
        OwnLoss().row_weights(targets)
    assert OwnLoss("labels", "tokens").row_weights(targets).tolist() == [5, 6, 6, 6, 6]
    assert OwnLoss("labels", "shifted_tokens").row_weights(targets).tolist() == [5] * 5
    assert OwnLoss("labels", "samples").row_weights(targets).tolist() == [1] * 5
    with pytest.raises(
        ConfigError, match=r"loss\.mean=token: must be null or one of: samples, tokens, shifted"
    ):
        OwnLoss(mean="token")


def test_the_loader_gives_the_model_the_targets() -> None:
    data = Data(list(zip(IDS, TARGETS, strict=True)), None, classes=VOCABULARY, shape=(TOKENS,))
    loader = BatchLoader(data, Transforms(None, None), VOCABULARY, batch_size=2, seed=0)
    loader = replace(loader, model_input=OwnLoss().model_input)
    for input, target in (loader.traced_samples(), loader.measured_batch(3), next(loader.train(0))):
        assert isinstance(input, tuple) and torch.equal(input[1], target)
    node = {"_target_": f"{__name__}.ComputesLoss"}
    settings = ModelConfig(model=node, loss={"_target_": "gpipe_cli.losses.own.OwnLoss"}, allow=["tests"])
    model = make_model(settings, loader).sequence
    assert model(loader.traced_batch())[1].shape == ()


def tiny_llama() -> Any:
    return transformers().LlamaForCausalLM(tiny_config(use_cache=False))


def test_targets_are_not_shifted_twice() -> None:
    """A Llama with loss=own on texts learned to predict the token after the next."""
    ids = torch.arange(12).view(3, 4)
    data = Data(list(zip(ids, ids, strict=True)), None, 16, (4,), tokenizer=ByteTokenizer(()))
    loader = BatchLoader(
        data, Transforms(None, None), 16, batch_size=2, seed=0, model_input=OwnLoss().model_input
    )
    settings = CostConfig(
        model={"_target_": f"{__name__}.tiny_llama"},
        loss={"_target_": "gpipe_cli.losses.own.OwnLoss"},
        allow=["tests"],
    )
    with pytest.raises(
        ConfigError, match="loss=own: the targets of this data are the next tokens, and LlamaForC"
    ):
        make_model(settings, loader)


def test_inputs_that_are_dicts_get_the_targets_by_name() -> None:
    named = OwnLoss("wanted").model_input({"ids": IDS}, TARGETS)
    assert isinstance(named, dict) and named["wanted"] is TARGETS and named["ids"] is IDS
    assert isinstance(labeled := OwnLoss().model_input({"ids": IDS}, TARGETS), dict) and "labels" in labeled
    with pytest.raises(
        ConfigError, match=r"loss\.targets=wanted: is for data whose inputs are dicts; remove"
    ):
        OwnLoss("wanted").model_input(IDS, TARGETS)


@pytest.mark.parametrize(
    "output",
    [
        (IDS, torch.tensor(3.0)),
        [IDS, torch.tensor(3.0)],
        {"logits": IDS, "loss": torch.tensor(3.0), "count": torch.tensor(2)},
    ],
)
def test_the_loss_is_the_number_in_the_output(output: Any) -> None:
    assert OwnLoss()(output, TARGETS) == 3


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"loss=own: the model returns 0 numbers, and one of them must be its"
    ):
        OwnLoss()((IDS, None), TARGETS)
