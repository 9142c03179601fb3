"""Documents or conversations in files with a JSON object per line.

A field with a text is a document, all of whose tokens are scored. A field with a list of messages is a conversation,
of which only the tokens of the assistant are.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from gpipe_cli.data.chat import ChatError, ChatTemplate
from gpipe_cli.data.datasets import Data
from gpipe_cli.data.documents import Line, TextPiece, document_pieces, find_files, json_lines
from gpipe_cli.data.file_tokenizer import read_tokenizer
from gpipe_cli.data.token_cache import Piece
from gpipe_cli.data.token_data import TokenSpec, document_data, encode_documents, stored_tokens
from gpipe_cli.data.tokenizer import ByteTokenizer, DocumentTokenizer
from gpipe_cli.errors import ConfigError

_LINE_BREAK = (ord("\n"),)
"""Ends a document where tokens are bytes."""


def build(
    path: str,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    field: str = "text",
    context: int = 256,
    pack: bool = True,
    held_out: float = 0.1,
    cache: str | None = None,
) -> Data:
    """Hold out the last `held_out` share of the samples."""
    spec = TokenSpec(path, context, pack, held_out, cache)
    if not isinstance(field, str) or not field:
        raise ConfigError(f"data.field={field}: must be the name of a field")
    files = find_files(path)
    if eos_token is not None and tokenizer is None:
        raise ConfigError(f"data.eos_token={eos_token}: has no effect without data.tokenizer; leave it out")
    maker = ByteTokenizer(_LINE_BREAK) if tokenizer is None else read_tokenizer(tokenizer, eos_token)

    def pieces(path: Path, digest: str) -> Iterator[Piece]:
        lines = json_lines(path, digest, field)
        for is_text, group in groupby(lines, lambda line: isinstance(line[1], str)):
            encode = partial(_texts, maker) if is_text else partial(_conversations, maker.chat, field)
            yield from encode(group)

    settings = {"format": "jsonl", "field": field, "tokenizer": maker.digest, "suffix": maker.suffix}
    return document_data(spec, stored_tokens(spec, files, settings, pieces), maker)


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
