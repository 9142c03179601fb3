"""Classifiers of texts from the command line: labels, padding, names of the classes, every split and engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpipe_cli.data.texts import build_rows
from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers
from gpipe_cli.models.hf.pretrained import build
from gpipe_cli.sequential import to_sequential
from tests.support.command_line import Gpipe
from tests.support.hugging_face_models import save_model, tiny_config
from tests.support.tokenizers import save_tokenizer

KINDS = {"Bert": "AutoModelForMaskedLM", "Llama": "AutoModelForCausalLM"}
NAMES = ("angry", "calm", "happy")
WORDS = ("thee", "a summer's day", "shall I compare")
SPLITS = [
    ["engine=threads", "partitions=2", "schedule=1f1b", "checkpoint=always"],
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            ["engine=threads", "partitions=4", "schedule=zero_bubble"],
            ["engine=offload", "engine.slices=2"],
            ["engine=processes", "partitions=2"],
        )
    ),
]


def write_rows(path: Path, count: int = 24, classes: Sequence[Any] = NAMES) -> Path:
    lines = [
        {"text": " ".join([WORDS[place % 3]] * (1 + place % 4)), "label": classes[place % len(classes)]}
        for place in range(count)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module", params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was saved for another task, with a tokenizer and the texts to train on."""
    kind = request.param
    path = save_model(
        tmp_path_factory.mktemp("classifier") / kind,
        KINDS[kind],
        tiny_config(f"{kind}Config", vocab_size=300, pad_token_id=0 if kind == "Bert" else None),
    )
    write_rows(path / "rows.jsonl")
    return save_tokenizer(path, eos_token="<|endoftext|>")


def train(gpipe: Gpipe, directory: Path, run: Path, *words: str) -> list[dict[str, Any]]:
    answer = gpipe(
        "train", "model=hf", f"model.path={directory}", "data=rows", f"data.path={directory / 'rows.jsonl'}",
        "data.label=label", "data.context=16", "batch_size=8", "chunks=4", "epochs=2", "optimizer=adamw",
        "optimizer.lr=0.01", "log.every=1", "threads=1", f"run_dir={run}", *words,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def in_one_piece(gpipe: Gpipe, directory: Path) -> Path:
    """A run that the tests share."""
    run = directory / "run"
    if not run.exists():
        train(gpipe, directory, run, "partitions=1", "log.predictions=true")
    return run


@pytest.mark.parametrize("words", SPLITS, ids=" ".join)
def test_every_split_and_engine_gives_the_same_bits(
    gpipe: Gpipe, directory: Path, in_one_piece: Path, tmp_path: Path, words: list[str]
) -> None:
    rows = train(gpipe, directory, tmp_path / "run", *words)
    expected = [json.loads(line) for line in (in_one_piece / "metrics.jsonl").read_text().splitlines()]
    assert [(row["loss"], row.get("top1")) for row in rows] == [
        (row["loss"], row.get("top1")) for row in expected
    ]
    mine, theirs = (
        {
            name: tensor
            for file in run.glob("snapshots/*6/model*.safetensors")  # ranks write one each
            for name, tensor in load_file(file).items()
        }
        for run in (tmp_path / "run", in_one_piece)
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_names_of_the_classes_are_kept(
    gpipe: Gpipe, directory: Path, in_one_piece: Path, tmp_path: Path
) -> None:
    """In the confusion matrix, in predictions, and in what is exported, which from_pretrained loads."""
    assert json.loads((in_one_piece / "predictions.json").read_text())["class_names"] == [*NAMES]
    inputs = write_rows(tmp_path / "new.jsonl", count=5)
    answer = gpipe("predict", f"run={in_one_piece}", f"input={inputs}", "top=3", "--json")
    assert answer.code == 0, answer.err
    predictions = json.loads(answer.out)["predictions"]
    assert [row["file"] for row in predictions] == [f"{inputs}:{line}" for line in range(1, 6)]
    out = tmp_path / "exported"
    assert gpipe("export", f"run={in_one_piece}", "format=hf", f"out={out}").code == 0
    model = transformers().AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert [model.config.id2label[index] for index in range(3)] == [*NAMES]
    assert model.config.label2id == {name: index for index, name in enumerate(NAMES)}
    samples = build_rows(
        str(inputs), str(out), label="label", context=16, cache=str(tmp_path / "cache")
    ).train
    with torch.no_grad():
        scores = model(**samples.batch(torch.arange(5))[0]).logits  # type: ignore[union-attr]
    for row, expected in zip(predictions, scores.softmax(1), strict=True):
        found = {entry["class"]: entry["probability"] for entry in row["classes"]}
        torch.testing.assert_close(torch.tensor([found[name] for name in NAMES]), expected)


def test_padding_changes_no_scores(directory: Path, tmp_path: Path) -> None:
    """A decoder took the last token of the padding for the end of the text."""
    scores = []
    for context in (16, 29):
        data = build_rows(
            str(directory / "rows.jsonl"), str(directory), label="label", context=context, cache=str(tmp_path)
        )
        torch.manual_seed(0)
        model = build(
            str(directory),
            num_classes=3,
            input_shape=(context,),
            tokenizer=data.tokenizer,
            class_names=data.class_names,
            init="random",
        ).eval()
        input, _ = data.train.batch(torch.arange(8))  # type: ignore[union-attr]
        with torch.no_grad():
            scores.append(to_sequential(model, input)(input).logits)
            alone = [
                model(
                    **{key: each[:1, : int(row["attention_mask"].sum())] for key, each in row.items()}
                ).logits
                for row in (
                    {key: each[place : place + 1] for key, each in input.items()} for place in range(8)
                )
            ]
        torch.testing.assert_close(scores[-1], torch.cat(alone))
    torch.testing.assert_close(*scores)


def test_a_head_with_the_classes_in_another_order_is_refused(tmp_path: Path) -> None:
    config = tiny_config("BertConfig", pad_token_id=0, id2label={0: "no", 1: "maybe", 2: "yes"})
    save_model(tmp_path, "AutoModelForSequenceClassification", config)
    keys: dict[str, Any] = {"path": str(tmp_path), "num_classes": 3, "input_shape": (8,)}
    with pytest.raises(ConfigError, match=r"in another order; give data\.labels=\[no,maybe,yes\]"):
        build(**keys, class_names=("maybe", "no", "yes"))
    assert build(**keys, class_names=("no", "maybe", "yes")).config.id2label[1] == "maybe"


def test_another_token_for_padding_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "AutoModelForCausalLM", tiny_config(pad_token_id=3))
    data = build_rows(
        str(write_rows(tmp_path / "rows")), label="label", context=8, cache=str(tmp_path / "cache")
    )
    with pytest.raises(ConfigError, match=r"pads with token 3 \(pad_token_id\), and the data with token 0"):
        build(
            str(tmp_path),
            init="random",
            input_shape=(8,),
            tokenizer=type("Tokens", (), {"vocabulary": 64, "padding": data.tokenizer.padding})(),  # type: ignore[union-attr]
            class_names=NAMES,
        )


def test_data_without_labels_is_refused_with_what_to_give(
    gpipe: Gpipe, directory: Path, tmp_path: Path
) -> None:
    words = ("train", "model=hf", f"model.path={directory}", "data=rows", "data.context=16")
    rows = f"data.path={directory / 'rows.jsonl'}"
    for more, message in (
        (["model.task=sequence_classification"], "needs a class for each text; name its field"),
        (["data.label=label", "model.task=causal_lm"], "has no use for data.label"),
    ):
        answer = gpipe(*words, rows, *more, f"run_dir={tmp_path / 'run'}")
        assert answer.code == 2 and message in answer.err
