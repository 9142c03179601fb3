"""Data sets of documents: text files, by default Shakespeare's sonnets (see files/sonnets.md), and files with rows.

Without a tokenizer a byte is a token, so any encoding and language works. With one, its tokens are made once and read
from a cache after that. In a file with rows, a field with a text is a document, all of whose tokens are scored, and one
with a list of messages is a conversation, of which only the tokens of the assistant are. If another field has the class
of each text, that is the target instead.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.documents import (
    DataRow,
    TextPiece,
    document_pieces,
    find_files,
    find_rows,
    reading,
    rows,
    text_file,
)
from gpipe_cli.data.token_cache import Piece
from gpipe_cli.data.token_data import (
    JOINED,
    TokenSpec,
    cut,
    document_data,
    encode_documents,
    labeled_data,
    padded,
    stored_tokens,
    stream_data,
)
from gpipe_cli.data.tokenizer import (
    ByteTokenizer,
    ChatError,
    ChatTemplate,
    DocumentTokenizer,
    FileTokenizer,
    read_tokenizer,
)
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput, map_tensors
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import AUTO, FilePath, check_whole_number

_SONNETS = Path(__file__).parent / "files" / "sonnets.txt"
_BYTE_STRIDE = 8
_MAX_BYTES_IN_MEMORY = 2**30
"""A larger file is mapped from the cache."""
_LINE_BREAK = (ord("\n"),)
"""Ends a document of JSON lines where tokens are bytes."""
_MAX_CLASSES, _MAX_NAME = 2**16, 256
"""How many classes, and characters of a name, may be; a field with more is no label."""
_ROWS_AT_ONCE = 1000


def build_text_files(
    path: FilePath | None = None,
    context: int = 32,
    stride: int | None = None,
    held_out: float = 0.1,
    *,
    tokenizer: FilePath | None = AUTO,
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
    maker = make_tokenizer(tokenizer, eos_token)
    if isinstance(maker, ByteTokenizer):
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
    tokenizer: FilePath | None = AUTO,
    eos_token: str | None = None,
    field: str = "text",
    context: int = 256,
    pack: bool | str = True,
    held_out: float | None = None,
    cache: FilePath | None = None,
    *,
    label: str | None = None,
    labels: list[str] | None = None,
    test: FilePath | None = None,
) -> Data:
    """Texts or chats from JSON lines, parquet or a directory of `datasets`; `pack` is as for text files.

    test: the rows to evaluate on; None: the last `held_out` share of `path`, or its own split for that.
    label: the field with the class of each text. labels: the classes in order.
    """
    spec = TokenSpec(path, context, pack, held_out, cache)
    fields = {"data.field": field} if label is None else {"data.field": field, "data.label": label}
    for key, name in fields.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{key}={name}: must be the name of a field")
    if label is None and labels is not None:
        raise ConfigError("data.labels: has no effect without data.label; remove it")
    files, held_out_files = find_rows(path)
    if held_out is not None and test is not None:
        raise ConfigError(
            f"data.test={test}: has its own rows, so data.held_out={held_out} has no effect; remove one"
        )
    if held_out is not None or test is not None:
        held_out_files = [] if test is None else find_rows(test)[0]
    maker = make_tokenizer(tokenizer, eos_token, end_of_bytes=_LINE_BREAK)
    pieces = partial(_pieces, maker, fields)
    settings = {"format": "jsonl", "field": field, "tokenizer": maker.digest, "suffix": maker.suffix}
    if label is not None:
        settings |= {"format": "labels", "label": label}
    stored = stored_tokens(spec, files, settings, pieces, held_out_files)
    if label is None:
        first = stored.tokens[: int(stored.documents[0, 0])]
        return replace(document_data(spec, stored, maker), has_chats=bool((first < 0).any()))
    if pack == JOINED:
        raise ConfigError(f"data.pack={JOINED}: has no effect on texts with data.label; remove it")
    return labeled_data(spec, stored, maker, label, list(map(str, labels or ())))


def text_inputs(
    path: Path, field: str, tokenizer: FileTokenizer | ByteTokenizer, context: int
) -> Iterator[tuple[str, ModelInput]]:
    """Where each row of a file is, and the input of a classifier for its text."""
    for row in rows(path, None, {"data.field": field}):
        (tokens,) = tokenizer.encode_pieces([_utf8(row, row.value("data.field", field))])
        text = torch.tensor([*tokenizer.prefix, *tokens, *tokenizer.closing], dtype=torch.int64)
        inputs = padded([cut(text, context, tokenizer.closing)], context, tokenizer.padding or 0)
        yield f"{path}:{row.place.partition(' ')[2]}", map_tensors(lambda tensor: tensor[0], inputs)


def _pieces(
    tokenizer: FileTokenizer | ByteTokenizer, fields: Mapping[str, str], path: Path, digest: str
) -> Iterator[Piece]:
    key, field = next(iter(fields.items()))
    found = ((row, row.value(key, field)) for row in rows(path, digest, fields))
    if "data.label" in fields:
        yield from _labeled(tokenizer, fields["data.label"], found)
        return
    for is_text, group in groupby(found, lambda pair: isinstance(pair[1], str)):
        encode = partial(_texts, tokenizer) if is_text else partial(_conversations, tokenizer.chat, field)
        yield from encode(group)


def _labeled(
    tokenizer: DocumentTokenizer, label: str, found: Iterator[tuple[DataRow, Any]]
) -> Iterator[Piece]:
    names = set[str]()
    while group := list(islice(found, _ROWS_AT_ONCE)):
        texts = [_utf8(row, text) for row, text in group]
        for (row, _), tokens in zip(group, tokenizer.encode_pieces(texts), strict=True):
            name = _label(row, row.value("data.label", label))
            names.add(name)
            if len(names) > _MAX_CLASSES:
                raise row.error(
                    f"field '{label}' has more than {_MAX_CLASSES} values, so they are not classes"
                )
            text = array("i", (*tokenizer.prefix, *tokens, *tokenizer.closing))
            if not text:
                raise row.error("the text has no tokens; remove the row")
            yield Piece(text, ends_document=True, label=name)


def _label(row: DataRow, label: Any) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise row.error(f"the label is a {type(label).__name__}; it must be a text or a whole number")
    if isinstance(label, int) and label < 0:
        raise row.error(f"the label is {label}, which means that there is none; remove the row")
    name = str(label)
    if not 0 < len(name) <= _MAX_NAME:
        raise row.error(f"the label has {len(name)} characters; a label has 1 to {_MAX_NAME}")
    return name


def _utf8(row: DataRow, text: Any) -> bytes:
    if not isinstance(text, str):
        raise row.error(f"the text is a {type(text).__name__}; with data.label it must be a text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise row.error("has an escape that is half a character") from error


def make_tokenizer(
    path: str | None, eos_token: str | None, end_of_bytes: tuple[int, ...] = ()
) -> FileTokenizer | ByteTokenizer:
    """A `DocumentTokenizer`; without a path that of bytes, whose documents end with `end_of_bytes`.

    path: AUTO stands for none here, because the tokenizer of a model has replaced it.
    """
    if path not in (None, AUTO):
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


def _texts(tokenizer: DocumentTokenizer, found: Iterable[tuple[DataRow, str]]) -> Iterator[Piece]:
    def pieces() -> Iterator[TextPiece]:
        for row, text in found:
            if not tokenizer.suffix:
                raise row.error(
                    "the tokenizer has no eos token to end the text with; name one with data.eos_token=TOKEN"
                )
            yield from document_pieces(io.BytesIO(_utf8(row, text)).read)

    return encode_documents(tokenizer, pieces())


def _conversations(
    chat: ChatTemplate | None, field: str, found: Iterable[tuple[DataRow, Any]]
) -> Iterator[Piece]:
    for row, messages in found:
        if not isinstance(messages, list):
            kind = type(messages).__name__
            raise row.error(f"field '{field}' is a {kind}; it must be a text or a list of messages")
        if chat is None:
            raise row.error(
                "messages need a chat template, which the tokenizer does not have; give a directory with one "
                "in tokenizer_config.json or chat_template.jinja as data.tokenizer"
            )
        try:
            yield Piece(chat.encode(messages), ends_document=True)
        except ChatError as error:
            raise row.error(str(error)) from error
