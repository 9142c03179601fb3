"""JSON lines as samples: packed or padded, with only the assistant's tokens scored; every bad line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.data import documents, jsonl, text
from gpipe_cli.data.file_tokenizer import read_tokenizer
from gpipe_cli.errors import ConfigError, DataError, GpipeError
from tests.support.tokenizers import CHATML, save_tokenizer

WORDS = ["shall I", "compare thee", "to a WINTER'S day?", "é ü", "thee"]


def write(path: Path, *values: object, field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: value}) + "\n" for value in values), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tokenizer with an eos token; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tokenizer(tmp_path / "tokenizer", eos_token="<|endoftext|>", chat_template=CHATML, bos=True)


def test_packed_texts_are_one_stream_with_their_beginnings_and_ends(tmp_path: Path, folder: Path) -> None:
    tokenizer = read_tokenizer(str(folder))
    data = jsonl.build(write(tmp_path / "a", *WORDS), str(folder), context=4, held_out=0.5)
    stream = [token for word in WORDS for token in (*tokenizer.encode(word), 0)]
    held_out = [token for word in WORDS[3:] for token in (*tokenizer.encode(word), 0)]
    assert stream[0] == 3 and data.classes == tokenizer.vocabulary and data.shape == (4,)
    for samples, tokens in ((data.train, stream[: -len(held_out)]), (data.test, held_out)):
        assert len(samples) == (len(tokens) - 1) // 4
        for index in range(len(samples)):
            input, target = samples[index]
            assert isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor)
            assert input.tolist() == tokens[4 * index : 4 * index + 4]
            assert target.tolist() == tokens[4 * index + 1 : 4 * index + 5]


def test_padded_texts_have_a_mask_and_no_target_in_the_padding(tmp_path: Path, folder: Path) -> None:
    tokenizer = read_tokenizer(str(folder))
    data = jsonl.build(write(tmp_path / "a", *WORDS), str(folder), context=9, held_out=0.2, pack=False)
    assert (len(data.train), len(data.test)) == (4, 1)
    cut = 0
    for index, word in enumerate(WORDS[:4]):
        tokens = [*tokenizer.encode(word), 0]
        cut += len(tokens) > 10
        length = min(len(tokens) - 1, 9)
        input, target = data.train[index]
        assert isinstance(input, dict) and isinstance(target, torch.Tensor)
        assert input["input_ids"].tolist() == [*tokens[:length], *[0] * (9 - length)]
        assert input["attention_mask"].tolist() == [1] * length + [0] * (9 - length)
        assert target.tolist() == [*tokens[1 : length + 1], *[-100] * (9 - length)]
    assert cut == 1 and data.notes == ("data.context=9: 1 of 5 samples are longer and were cut",)


@pytest.mark.parametrize("pack", [False, True])
def test_chats_score_the_answers_only(tmp_path: Path, folder: Path, pack: bool) -> None:
    chat = [{"role": "user", "content": "shall I"}, {"role": "assistant", "content": "compare thee"}]
    path = write(tmp_path / "a", *[chat] * 6, chat[:1], chat[1:] * 300, chat, field="messages")
    data = jsonl.build(path, str(folder), field="messages", context=24, held_out=0.2, pack=pack)
    scored = [int(token) for index in range(5) for token in data.train[index][1] if token != -100]
    answer = read_tokenizer(str(folder))._backend.decode(scored, skip_special_tokens=False)
    assert "compare thee<|im_end|>" in answer and "shall" not in answer and "user" not in answer
    if not pack:
        assert data.notes[1].endswith("1 of 9 samples have no token to score and were left out")
        assert len(data.train) + len(data.test) == 8


def test_bytes_need_no_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "ab", "cé", "d" * 9)
    data = jsonl.build(path, context=5, held_out=0.3, cache=str(tmp_path / "cache"))
    assert (data.classes, len(data.train), len(data.test)) == (256, 1, 1)
    assert bytes(data.train[0][0].tolist()) == b"ab\nc\xc3"  # type: ignore[union-attr]


def test_a_changed_file_tokenizer_or_setting_makes_new_tokens(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "a", *WORDS)
    keys: dict[str, Any] = {"context": 3, "held_out": 0.5}
    jsonl.build(path, str(folder), **keys)
    entries = tmp_path / "cache" / "gpipe" / "tokens"

    def count() -> int:
        return len(list(entries.glob("*/index.json")))

    jsonl.build(path, str(folder), **{**keys, "pack": False, "context": 2})
    assert count() == 1, "packing and context do not change tokens"
    jsonl.build(path, str(folder), **keys, eos_token="<|im_end|>")
    assert count() == 2
    write(tmp_path / "a", *WORDS[1:], WORDS[0])
    jsonl.build(path, str(folder), **keys)
    assert count() == 3
    text.build(path, 3, tokenizer=str(folder / "tokenizer.json"))
    assert count() == 4


GOOD = '{"text": "shall I"}\n' * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a: is empty"),
        ("\n\n", "a: is empty"),
        (
            GOOD + "{'text': 1}",
            "line 5: is not JSON: Expecting property name enclosed in double quotes at column 2",
        ),
        (GOOD + '\n{"text": "cut', "line 6: is not JSON: Unterminated string starting at column 10"),
        (GOOD + "[" * 9999, "line 5: is not JSON: it is nested more than 32 levels deep"),
        (GOOD + "[1]", "line 5: is no JSON object but a list"),
        (GOOD + '{"content": "a"}', "line 5: has no field 'text'; set data.field to one of: content"),
        (GOOD + '{"text": 3}', "line 5: field 'text' is a int; it must be a text or a list of messages"),
        (GOOD + '{"text": null}', "line 5: field 'text' is a NoneType; it must be a text"),
        (GOOD + '{"text": [{"content": "a"}]}', "line 5: message 1 has no role"),
        (GOOD + '{"text": "\\ud800"}', "line 5: has an escape that is half a character"),
        ('{"text": "shall I"}', "a: has 1 sample, but one to train on and one to hold out are needed"),
        (GOOD, "tokens are too few to train on and to hold out windows of 256"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, folder: Path, content: str, message: str) -> None:
    (tmp_path / "a").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        jsonl.build(str(tmp_path / "a"), str(folder))


def test_bytes_that_are_no_text_are_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD.encode() + b'{"text": "\xff"}')
    with pytest.raises(DataError, match="line 5: is not JSON: 'utf-8' codec can't decode byte 0xff"):
        jsonl.build(str(tmp_path / "a"), str(folder))
    with pytest.raises(
        DataError, match=r"a: is not UTF-8 text \(invalid start byte\), which data\.tokenizer needs"
    ):
        text.build(str(tmp_path / "a"), tokenizer=str(folder))


def test_a_line_that_never_ends_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 50)
    (tmp_path / "a").write_text(GOOD + "x" * 51)
    with pytest.raises(DataError, match="line 5: is longer than 50 bytes"):
        jsonl.build(str(tmp_path / "a"), str(folder))


def test_chats_without_any_answer_are_refused(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "a", *[[{"role": "user", "content": "shall I"}]] * 3)
    with pytest.raises(DataError, match=r"no sample has a token to score within data\.context=256"):
        jsonl.build(path, str(folder), pack=False)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (
            {},
            "thee",
            "line 1: the tokenizer has no eos token to end the text with; name one with data.eos_token",
        ),
        (
            {},
            [{"role": "user", "content": "a"}],
            "line 1: messages need a chat template, which the tokenizer does",
        ),
        ({"eos_token": "</s>"}, "thee", r"data\.eos_token=</s>: is no token of"),
        ({"field": ""}, "thee", r"data\.field=: must be the name of a field"),
        ({"pack": "yes"}, "thee", r"data\.pack=yes: must be true or false"),
        ({"context": 0}, "thee", r"data\.context=0: must be a whole number of at least 1"),
    ],
)
def test_what_a_bare_tokenizer_lacks_is_named(
    tmp_path: Path, folder: Path, keys: dict[str, Any], value: object, message: str
) -> None:
    path = write(tmp_path / "a", value, value)
    with pytest.raises(GpipeError, match=message):
        jsonl.build(path, str(folder / "tokenizer.json"), **keys)


def test_padding_needs_a_token(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    path = write(tmp_path / "a", chat, chat)
    with pytest.raises(
        ConfigError, match=r"neither a pad token nor an eos token to pad with; .*data\.eos_token"
    ):
        jsonl.build(path, str(folder), pack=False, cache=str(tmp_path / "cache"))
