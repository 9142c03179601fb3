"""Windows of a text: no held-out byte is trained on, and none is left out."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe_cli.data
from gpipe_cli.data import text
from gpipe_cli.data.loading import batches
from gpipe_cli.errors import ConfigError, DataError, ResourceError
from tests.support.tokenizers import save_tokenizer

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
    data = text.build(path, context, stride, share)
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
    data = text.build()
    input, target = next(batches(data.train, batch_size=4, seed=0, epoch=0, shuffle=True))
    assert input.dtype == target.dtype == torch.long and input.shape == target.shape == (4, 32)
    assert torch.equal(input[:, 1:], target[:, :-1])
    input.zero_()
    again, _ = next(batches(data.train, batch_size=4, seed=0, epoch=0, shuffle=True))
    assert again.any()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=nowhere\.txt: cannot be read: No such file"):
        text.build("nowhere.txt")
    with pytest.raises(DataError, match="cannot be read: is a directory"):
        text.build(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty: is empty"):
        text.build(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"empty: is empty"):
        folder = save_tokenizer(tmp_path / "tokenizer", eos_token="<|endoftext|>")
        text.build(str(tmp_path / "empty"), tokenizer=str(folder), cache=str(tmp_path / "cache"))
    with pytest.raises(
        DataError,
        match=r"65 bytes are too few to train on and to hold out windows of 32; .* smaller data\.context",
    ):
        text.build(numbered(tmp_path / "short", 65))
    assert len(text.build(numbered(tmp_path / "enough", 66)).train) == 1


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
            text.build(str(path), tokenizer=tokenizer, cache=str(tmp_path / "cache"))


def test_a_text_whose_tokens_do_not_fit_on_the_disk_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
    message = r"long: has 1,099,511,627,776 bytes, .* has 1,073,741,824 left; .* data\.cache=FOLDER"
    with pytest.raises(ResourceError, match=message):
        text.build(str(tmp_path / "long"), cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("context", 0, "of at least 1"), ("stride", 0, "of at least 1"), ("held_out", 1.0, "between 0 and 1")],
)
def test_a_wrong_key_is_named_with_its_value(key: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}={value}: must be .*{message}"):
        text.build(**{key: value})  # type: ignore[arg-type]
