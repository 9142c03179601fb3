"""Prediction of the next token of text files; by default Shakespeare's sonnets (see files/sonnets.md).

Without a tokenizer a byte is a token, so any encoding and language works. With one, its tokens are made once and read
from a cache after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.documents import find_files, reading, text_file
from gpipe_cli.data.file_tokenizer import read_tokenizer
from gpipe_cli.data.token_cache import Piece
from gpipe_cli.data.token_data import TokenSpec, document_data, encode_documents, stored_tokens, stream_data
from gpipe_cli.data.tokenizer import ByteTokenizer, DocumentTokenizer
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.safe_files import read_regular
from gpipe_cli.values import check_whole_number

_FILE = Path(__file__).parent / "files" / "sonnets.txt"
_BYTE_STRIDE = 8
_MAX_BYTES_IN_MEMORY = 2**30
"""A larger file is mapped from the cache."""


def build(
    path: str | None = None,
    context: int = 32,
    stride: int | None = None,
    held_out: float = 0.1,
    *,
    tokenizer: str | None = None,
    eos_token: str | None = None,
    pack: bool = True,
    cache: str | None = None,
) -> Data:
    """Make a window of `context` tokens every `stride` tokens; hold out the last `held_out` share of the text."""
    spec = TokenSpec(str(_FILE) if path is None else path, context, pack, held_out, cache)
    if stride is not None:
        check_whole_number("data.stride", stride, least=1)
        if not pack:
            raise ConfigError(f"data.stride={stride}: has no effect with data.pack=false; leave it out")
    if eos_token is not None and tokenizer is None:
        raise ConfigError(f"data.eos_token={eos_token}: has no effect without data.tokenizer; leave it out")
    files = find_files(spec.path)
    if tokenizer is None:
        stride = stride or _BYTE_STRIDE
        if pack and len(files) == 1 and _fits_in_memory(files[0]):
            return stream_data(spec, _read(files[0]), ByteTokenizer(), stride)
    maker: DocumentTokenizer = ByteTokenizer() if tokenizer is None else read_tokenizer(tokenizer, eos_token)

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
        return stream_data(spec, stored.tokens, maker, stride or context)
    return document_data(spec, stored, maker)


def _fits_in_memory(path: Path) -> bool:
    with reading(path):
        return path.stat().st_size <= _MAX_BYTES_IN_MEMORY


def _read(path: Path) -> Tensor:
    with reading(path):
        content = bytearray(read_regular(path, _MAX_BYTES_IN_MEMORY))
    if not content:
        raise DataError(f"data.path={path}: is empty")
    return torch.frombuffer(content, dtype=torch.uint8)
