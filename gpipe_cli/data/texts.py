"""Data sets of documents: text files, by default Shakespeare's sonnets (see files/sonnets.md), and JSON lines.

Without a tokenizer a byte is a token, so any encoding and language works. With one, its tokens are made once and read
from a cache after that. In a file with a JSON object per line, a field with a text is a document, all of whose tokens
are scored, and one with a list of messages is a conversation, of which only the tokens of the assistant are.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.documents import (
    Line,
    TextPiece,
    document_pieces,
    find_files,
    json_lines,
    reading,
    text_file,
)
from gpipe_cli.data.token_cache import Piece
from gpipe_cli.data.token_data import TokenSpec, document_data, encode_documents, stored_tokens, stream_data
from gpipe_cli.data.tokenizer import (
    ByteTokenizer,
    ChatError,
    ChatTemplate,
    DocumentTokenizer,
    FileTokenizer,
    read_tokenizer,
)
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import FilePath, check_whole_number

_SONNETS = Path(__file__).parent / "files" / "sonnets.txt"
_BYTE_STRIDE = 8
_MAX_BYTES_IN_MEMORY = 2**30
"""A larger file is mapped from the cache."""
_LINE_BREAK = (ord("\n"),)
"""Ends a document of JSON lines where tokens are bytes."""


def build_text_files(
    path: FilePath | None = None,
    context: int = 32,
    stride: int | None = None,
    held_out: float = 0.1,
    *,
    tokenizer: FilePath | None = None,
    eos_token: str | None = None,
    pack: bool | str = True,
    cache: FilePath | None = None,
) -> Data:
    """Make a window of `context` tokens every `stride` tokens; hold out the last `held_out` share of the text.

    pack: join files into windows, which see each other if it is `joined`; if it is false, a file is a sample.
    """
    spec = TokenSpec(str(_SONNETS) if path is None else path, context, pack, held_out, cache)
    if stride is not None:
        check_whole_number("data.stride", stride, least=1)
        if not pack:
            raise ConfigError(f"data.stride={stride}: has no effect with data.pack=false; remove it")
    files = find_files(spec.path)
    maker = _tokenizer(tokenizer, eos_token)
    if tokenizer is None:
        stride = stride or _BYTE_STRIDE
        if pack and len(files) == 1 and _fits_in_memory(files[0]):
            return stream_data(spec, _read(files[0]), maker, stride)

    def pieces(path: Path, digest: str) -> Iterator[Piece]:
        try:
            yield from encode_documents(maker, text_file(path, digest))
        except UnicodeDecodeError as error:
            raise DataError(
                f"data.path={path}: is not UTF-8 text ({error.reason}), which data.tokenizer needs"
            ) from error

    settings = {"format": "text", "tokenizer": maker.digest, "suffix": maker.suffix}
    stored = stored_tokens(spec, files, settings, pieces)
    if pack:
        return stream_data(spec, stored.tokens, maker, stride or context, stored.documents[:, 0])
    return document_data(spec, stored, maker)


def build_rows(
    path: FilePath,
    tokenizer: FilePath | None = None,
    eos_token: str | None = None,
    field: str = "text",
    context: int = 256,
    pack: bool | str = True,
    held_out: float = 0.1,
    cache: FilePath | None = None,
) -> Data:
    """Hold out the last `held_out` share of the samples; `pack` is as for text files."""
    spec = TokenSpec(path, context, pack, held_out, cache)
    if not isinstance(field, str) or not field:
        raise ConfigError(f"data.field={field}: must be the name of a field")
    files = find_files(path)
    maker = _tokenizer(tokenizer, eos_token, end_of_bytes=_LINE_BREAK)

    def pieces(path: Path, digest: str) -> Iterator[Piece]:
        lines = json_lines(path, digest, field)
        for is_text, group in groupby(lines, lambda line: isinstance(line[1], str)):
            encode = partial(_texts, maker) if is_text else partial(_conversations, maker.chat, field)
            yield from encode(group)

    settings = {"format": "jsonl", "field": field, "tokenizer": maker.digest, "suffix": maker.suffix}
    return document_data(spec, stored_tokens(spec, files, settings, pieces), maker)


def _tokenizer(
    path: str | None, eos_token: str | None, end_of_bytes: tuple[int, ...] = ()
) -> FileTokenizer | ByteTokenizer:
    """A `DocumentTokenizer`; without a path that of bytes, whose documents end with `end_of_bytes`."""
    if path is not None:
        return read_tokenizer(path, eos_token)
    if eos_token is not None:
        raise ConfigError(f"data.eos_token={eos_token}: has no effect without data.tokenizer; remove it")
    return ByteTokenizer(end_of_bytes)


def _fits_in_memory(path: Path) -> bool:
    with reading(path):
        return path.stat().st_size <= _MAX_BYTES_IN_MEMORY


def _read(path: Path) -> Tensor:
    with reading(path):
        content = bytearray(read_regular(path, _MAX_BYTES_IN_MEMORY))
    if not content:
        raise DataError(f"data.path={path}: is empty")
    return torch.frombuffer(content, dtype=torch.uint8)


def _texts(tokenizer: DocumentTokenizer, lines: Iterable[tuple[Line, str]]) -> Iterator[Piece]:
    def pieces() -> Iterator[TextPiece]:
        for line, text in lines:
            if not tokenizer.suffix:
                raise line.error(
                    "the tokenizer has no eos token to end the text with; name one with data.eos_token=TOKEN"
                )
            try:
                content = text.encode()
            except UnicodeEncodeError as error:
                raise line.error("has an escape that is half a character") from error
            yield from document_pieces(io.BytesIO(content).read)

    return encode_documents(tokenizer, pieces())


def _conversations(
    chat: ChatTemplate | None, field: str, lines: Iterable[tuple[Line, Any]]
) -> Iterator[Piece]:
    for line, messages in lines:
        if not isinstance(messages, list):
            kind = type(messages).__name__
            raise line.error(f"field '{field}' is a {kind}; it must be a text or a list of messages")
        if chat is None:
            raise line.error(
                "messages need a chat template, which the tokenizer does not have; give a directory with one "
                "in tokenizer_config.json or chat_template.jinja as data.tokenizer"
            )
        try:
            yield Piece(chat.encode(messages), ends_document=True)
        except ChatError as error:
            raise line.error(str(error)) from error
