"""Tokens in the cache: made once, by one process, and never used if damaged."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from gpipe_cli.data.token_cache import NEVER, Piece, TokenCache
from gpipe_cli.errors import DataError, ResourceError

SETTINGS = {"tokenizer": "a"}


def pieces() -> Iterator[Piece]:
    yield Piece(array("i", [1, ~2]), ends_document=False)
    yield Piece(array("i", [3]), ends_document=True)
    yield Piece(array("i", [~4, ~5]), ends_document=True)


def never() -> Iterator[Piece]:
    raise AssertionError("they are in the cache")


def test_documents_come_back_with_the_place_of_their_first_scored_token(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path / "cache")
    for make in (pieces, never):
        stored = cache.get(SETTINGS, make)
        assert stored.tokens.tolist() == [1, ~2, 3, ~4, ~5]
        assert stored.documents.tolist() == [[3, 2], [5, NEVER]]
    with pytest.raises(AssertionError, match="they are in the cache"):
        cache.get({"tokenizer": "b"}, never)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "index", "missing"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    cache = TokenCache(tmp_path)
    cache.get(SETTINGS, pieces)
    (tokens,) = tmp_path.glob("*/tokens.int32")
    match damage:
        case "flipped":
            tokens.write_bytes(tokens.read_bytes()[:-1] + b"\0")
        case "short":
            os.truncate(tokens, 8)
        case "empty":
            os.truncate(tokens, 0)
        case "index":
            (tokens.parent / "index.json").write_text("{")
        case "missing":
            tokens.unlink()
    assert cache.get(SETTINGS, pieces).tokens.tolist() == [1, ~2, 3, ~4, ~5]
    assert cache.get(SETTINGS, never)


def test_a_file_that_was_only_touched_is_used(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    cache.get(SETTINGS, pieces)
    (tokens,) = tmp_path.glob("*/tokens.int32")
    tokens.touch()
    assert cache.get(SETTINGS, never)


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Iterator[Piece]:
        yield from pieces()
        raise DataError("line 4: is not JSON")

    cache = TokenCache(tmp_path)
    with pytest.raises(DataError, match="line 4"):
        cache.get(SETTINGS, failing)
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".lock"
    (tmp_path / f"{left.stem}.tmp123").mkdir()  # as a killed process leaves it
    cache.get(SETTINGS, pieces)
    assert not list(tmp_path.glob("*.tmp*"))


def _make_slowly(folder: Path) -> list[int]:
    def slow() -> Iterator[Piece]:
        with (folder / "made").open("a") as made:
            made.write("x")
        time.sleep(0.2)
        yield from pieces()

    tokens: list[int] = TokenCache(folder).get(SETTINGS, slow).tokens.tolist()
    return tokens


def test_processes_that_start_together_make_an_entry_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, get_context("fork")) as pool:
        results = list(pool.map(_make_slowly, [tmp_path] * 3))
    assert results == [[1, ~2, 3, ~4, ~5]] * 3
    assert (tmp_path / "made").read_text() == "x"


def test_without_locks_the_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    cache = TokenCache(tmp_path)

    def slower() -> Iterator[Piece]:
        cache.get(SETTINGS, pieces)
        yield from pieces()

    assert cache.get(SETTINGS, slower).tokens.tolist() == [1, ~2, 3, ~4, ~5]
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_source_is_read_again_only_if_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, source = TokenCache(tmp_path / "cache"), tmp_path / "source"
    source.write_text("first")
    fresh = cache.digest_of(source)
    assert not list((tmp_path / "cache").iterdir()), (
        "a new file may still change within one tick of the clock"
    )
    later = time.time_ns() + 10**10
    monkeypatch.setattr("time.time_ns", lambda: later)
    assert cache.digest_of(source) == fresh
    monkeypatch.setattr("gpipe_cli.data.token_cache.file_digest", None)
    assert cache.digest_of(source) == fresh
    source.write_text("other")
    with pytest.raises(TypeError):
        cache.digest_of(source)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"data\.cache=.*file/tokens: cannot be written: Not a directory"):
        TokenCache(tmp_path / "file" / "tokens")
