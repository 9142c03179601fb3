"""Data sets of documents: no held-out byte is trained on, only answers of chats are scored, bad lines are named."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_cli.data
from gpipe_cli.data import documents
from gpipe_cli.data.loading import batches
from gpipe_cli.data.texts import build_rows, build_text_files
from gpipe_cli.data.tokenizer import read_tokenizer
from gpipe_cli.errors import ConfigError, DataError, GpipeError, ResourceError
from tests.support.tokenizers import CHATML, save_tokenizer

WORDS = ["shall I", "compare thee", "to a WINTER'S day?", "é ü", "thee"]
FILES = Path(gpipe_cli.data.__file__).parent / "files"


def numbered(path: Path, length: int) -> str:
    """A file whose bytes tell where they stand."""
    path.write_bytes(bytes(place % 251 for place in range(length)))
    return str(path)


@settings(max_examples=25)
@given(
    length=st.integers(22, 240),
    context=st.integers(1, 10),
    stride=st.integers(1, 12),
    share=st.floats(0.01, 0.4),
)
def test_the_target_is_the_next_byte_and_the_end_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, length: int, context: int, stride: int, share: float
) -> None:
    path = numbered(tmp_path_factory.mktemp("text") / "numbers", length)
    data = build_text_files(path, context, stride, share)
    assert data.shape == (context,) and data.classes == 256
    held_out = max(round(length * share), context + 1)
    for samples, first, step in ((data.train, 0, stride), (data.test, length - held_out, context)):
        for index in range(len(samples)):
            input, target = samples[index]
            assert isinstance(target, torch.Tensor)
            start = first + index * step
            assert input.tolist() == list(range(start, start + context))
            assert target.tolist() == list(range(start + 1, start + context + 1))
    last = len(data.train) - 1
    assert last * stride + context < length - held_out
    unused = held_out - 1 - len(data.test) * context
    assert 0 <= unused < context, "each held-out byte but a rest is to be guessed once"


def test_the_bundled_sonnets_are_whole() -> None:
    content = (FILES / "sonnets.txt").read_bytes()
    sonnets = content.decode("ascii").removesuffix("\n").split("\n\n")
    assert len(sonnets) == 80 and all(sonnet.count("\n") == 13 for sonnet in sonnets)
    assert sonnets[17].startswith("Shall I compare thee to a summer's day?\n")
    assert sonnets[72].endswith("  To love that well, which thou must leave ere long.")
    counts = Counter(content)
    entropy = -sum(count / len(content) * math.log2(count / len(content)) for count in counts.values())
    assert entropy == pytest.approx(4.46, abs=0.01), (
        "bits per byte of whoever knows only how frequent each is"
    )
    assert "public domain" in (FILES / "sonnets.md").read_text()


def test_batches_are_copies_as_whole_numbers() -> None:
    data = build_text_files()
    input, target = next(batches(data.train, batch_size=4, seed=0, epoch=0, shuffle=True))
    assert input.dtype == target.dtype == torch.long and input.shape == target.shape == (4, 32)
    assert torch.equal(input[:, 1:], target[:, :-1])
    input.zero_()
    again, _ = next(batches(data.train, batch_size=4, seed=0, epoch=0, shuffle=True))
    assert again.any()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=nowhere\.txt: cannot be read: No such file"):
        build_text_files("nowhere.txt")
    with pytest.raises(DataError, match="cannot be read: is a directory"):
        build_text_files(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty: is empty"):
        build_text_files(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"empty: is empty"):
        folder = save_tokenizer(tmp_path / "tokenizer", eos_token="<|endoftext|>")
        build_text_files(str(tmp_path / "empty"), tokenizer=str(folder), cache=str(tmp_path / "cache"))
    with pytest.raises(
        DataError,
        match=r"65 bytes are too few to train on and to hold out windows of 32; .* smaller data\.context",
    ):
        build_text_files(numbered(tmp_path / "short", 65))
    assert len(build_text_files(numbered(tmp_path / "enough", 66)).train) == 1


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json"])
def test_what_never_ends_or_is_too_long_is_refused_at_once(tmp_path: Path, tokenizer: str | None) -> None:
    """data.path=/dev/zero ended in a MemoryError, and a named pipe was waited for."""
    if tokenizer is not None:
        tokenizer = str(save_tokenizer(tmp_path) / tokenizer)
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        ("/dev/zero", "is a device"),
        (tmp_path / "pipe", "is a named pipe"),
    ):
        with pytest.raises(DataError, match=f"data.path={path}: cannot be read: {message}"):
            build_text_files(str(path), tokenizer=tokenizer, cache=str(tmp_path / "cache"))


def test_a_text_whose_tokens_do_not_fit_on_the_disk_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
    message = r"long: has 1,099,511,627,776 bytes, .* has 1,073,741,824 left; .* data\.cache=FOLDER"
    with pytest.raises(ResourceError, match=message):
        build_text_files(str(tmp_path / "long"), cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("context", 0, "of at least 1"), ("stride", 0, "of at least 1"), ("held_out", 1.0, "between 0 and 1")],
)
def test_a_wrong_key_is_named_with_its_value(key: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}={value}: must be .*{message}"):
        build_text_files(**{key: value})  # type: ignore[arg-type]


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
    path = write(tmp_path / "a", *WORDS)
    data = build_rows(path, str(folder), context=4, held_out=0.5, pack="joined")
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


@pytest.mark.parametrize(("build", "suffix"), [(build_rows, b"\n"), (build_text_files, b"\0")])
def test_packed_documents_begin_at_0_and_are_not_predicted_from_each_other(
    tmp_path: Path, build: Any, suffix: bytes
) -> None:
    parts = [bytes(range(97, 97 + length)) for length in (3, 1, 7, 5, 16, 2, 4, 4, 9)]
    for number, part in enumerate(parts):
        text = part.decode()
        content = json.dumps({"text": text}) if build is build_rows else f"{text}\0"
        (tmp_path / f"part{number}").write_text(content, encoding="utf-8")
    data = build(str(tmp_path / "part*"), context=6, held_out=0.4, cache=str(tmp_path / "cache"))
    documents = [part + suffix for part in parts]
    sources = [
        (byte, place, number) for number, each in enumerate(documents) for place, byte in enumerate(each)
    ]
    held_out = sum(map(len, documents[-4:])) if build is build_rows else round(len(sources) * 0.4)
    for samples, stream in ((data.train, sources[:-held_out]), (data.test, sources[-held_out:])):
        for index in range(len(samples)):
            window = (
                stream[6 * index : 6 * index + 7] if samples is data.test or build is build_rows else None
            )
            if window is None:  # training windows of text files overlap
                window = stream[8 * index : 8 * index + 7]
            input, target = samples[index]
            assert input["input_ids"].tolist() == [byte for byte, _, _ in window[:-1]]
            first = window[0]
            places = [place - (first[1] if number == first[2] else 0) for _, place, number in window]
            assert input["position_ids"].tolist() == places[:-1]
            pairs = pairwise(window)
            assert target.tolist() == [after[0] if after[2] == before[2] else -100 for before, after in pairs]


def test_joined_documents_and_a_single_one_are_plain_windows(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"context": 3, "held_out": 0.4, "cache": str(tmp_path / "cache")}
    path = write(tmp_path / "a", *WORDS)
    input, target = build_rows(path, **keys, pack="joined").train[1]
    assert isinstance(input, torch.Tensor) and input.tolist() == list(b"ll ") and -100 not in target  # type: ignore[operator]
    assert isinstance(build_text_files(path, tokenizer=None, **keys).train[0][0], torch.Tensor)


def test_padded_texts_have_a_mask_and_no_target_in_the_padding(tmp_path: Path, folder: Path) -> None:
    tokenizer = read_tokenizer(str(folder))
    data = build_rows(write(tmp_path / "a", *WORDS), str(folder), context=9, held_out=0.2, pack=False)
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
    data = build_rows(path, str(folder), field="messages", context=24, held_out=0.2, pack=pack)
    scored = [int(token) for index in range(5) for token in data.train[index][1] if token != -100]
    answer = read_tokenizer(str(folder))._backend.decode(scored, skip_special_tokens=False)
    assert "compare thee<|im_end|>" in answer and "shall" not in answer and "user" not in answer
    if not pack:
        assert data.notes[1].endswith("1 of 9 samples have no token to score and were left out")
        assert len(data.train) + len(data.test) == 8


def test_bytes_need_no_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "ab", "cé", "d" * 9)
    data = build_rows(path, context=5, held_out=0.3, cache=str(tmp_path / "cache"))
    assert (data.classes, len(data.train), len(data.test)) == (256, 1, 1)
    assert bytes(data.train[0][0]["input_ids"].tolist()) == b"ab\nc\xc3"  # type: ignore[call-overload]


def test_a_changed_file_tokenizer_or_setting_makes_new_tokens(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "a", *WORDS)
    keys: dict[str, Any] = {"context": 3, "held_out": 0.5}
    build_rows(path, str(folder), **keys)
    entries = tmp_path / "cache" / "gpipe" / "tokens"

    def count() -> int:
        return len(list(entries.glob("*/index.json")))

    build_rows(path, str(folder), **{**keys, "pack": False, "context": 2})
    assert count() == 1, "packing and context do not change tokens"
    build_rows(path, str(folder), **keys, eos_token="<|im_end|>")
    assert count() == 2
    write(tmp_path / "a", *WORDS[1:], WORDS[0])
    build_rows(path, str(folder), **keys)
    assert count() == 3
    build_text_files(path, 3, tokenizer=str(folder / "tokenizer.json"))
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
        (GOOD + "[1]", "line 5: is not a JSON object but a list"),
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
        build_rows(str(tmp_path / "a"), str(folder))


def test_bytes_that_are_no_text_are_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a").write_bytes(GOOD.encode() + b'{"text": "\xff"}')
    with pytest.raises(DataError, match="line 5: is not JSON: 'utf-8' codec can't decode byte 0xff"):
        build_rows(str(tmp_path / "a"), str(folder))
    with pytest.raises(
        DataError, match=r"a: is not UTF-8 text \(invalid start byte\), which data\.tokenizer needs"
    ):
        build_text_files(str(tmp_path / "a"), tokenizer=str(folder))


def test_a_line_that_never_ends_is_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 50)
    (tmp_path / "a").write_text(GOOD + "x" * 51)
    with pytest.raises(DataError, match="line 5: is longer than 50 bytes"):
        build_rows(str(tmp_path / "a"), str(folder))


def test_chats_without_any_answer_are_refused(tmp_path: Path, folder: Path) -> None:
    path = write(tmp_path / "a", *[[{"role": "user", "content": "shall I"}]] * 3)
    with pytest.raises(DataError, match=r"no sample has a token to score within data\.context=256"):
        build_rows(path, str(folder), pack=False)


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
        ({"eos_token": "</s>"}, "thee", r"data\.eos_token=</s>: is not a token of"),
        ({"field": ""}, "thee", r"data\.field=: must be the name of a field"),
        ({"pack": "yes"}, "thee", r"data\.pack=yes: must be true, false or joined"),
        ({"context": 0}, "thee", r"data\.context=0: must be a whole number of at least 1"),
    ],
)
def test_what_a_bare_tokenizer_lacks_is_named(
    tmp_path: Path, folder: Path, keys: dict[str, Any], value: object, message: str
) -> None:
    path = write(tmp_path / "a", value, value)
    with pytest.raises(GpipeError, match=message):
        build_rows(path, str(folder / "tokenizer.json"), **keys)


def test_padding_needs_a_token(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder = save_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    path = write(tmp_path / "a", chat, chat)
    with pytest.raises(
        ConfigError, match=r"neither a pad token nor an eos token to pad with; .*data\.eos_token"
    ):
        build_rows(path, str(folder), pack=False, cache=str(tmp_path / "cache"))
