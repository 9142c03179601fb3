"""A data set of documents: their tokens from the cache, divided into samples to train on and held-out ones.

Samples are packed into windows without gaps, or one document each, padded to one length. A sample has one token more
than its input: the target is the input one token later. A target that is not scored is -100. Packed documents do not
see each other: positions begin at 0 in each of them, models derive their masks from that, and the target after the end
of a document is not scored. Memory is mapped, so a batch reads only its own samples from the disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import Data
from gpipe_cli.data.documents import PIECE_BYTES, TextPiece, reading
from gpipe_cli.data.token_cache import Piece, StoredTokens, TokenCache
from gpipe_cli.data.tokenizer import ByteTokenizer, DocumentTokenizer
from gpipe_cli.errors import ConfigError, DataError
from gpipe_cli.pytree import ModelInput, map_tensors
from gpipe_cli.safe_files import user_cache
from gpipe_cli.values import IGNORED_LABEL, POSITIONS, check_whole_number

JOINED = "joined"
"""The value of data.pack with which packed documents see each other."""
_VERSION = 1
"""The version of how documents become tokens; a part of the name of a cache entry."""
_BYTES_AT_ONCE = 4 * PIECE_BYTES
"""Encoding takes up to 200 times as much memory."""


@final
@dataclass(frozen=True)
class TokenSpec:
    """The keys that data sets of documents share."""

    path: str
    context: int
    pack: bool | str
    held_out: float
    cache: str | None

    def __post_init__(self) -> None:
        check_whole_number("data.context", self.context, least=1)
        check_held_out(self.held_out)
        if not isinstance(self.pack, bool) and self.pack != JOINED:
            raise ConfigError(f"data.pack={self.pack}: must be true, false or {JOINED}")


def check_held_out(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(f"data.held_out={fraction}: must be between 0 and 1")


def stored_tokens(
    spec: TokenSpec,
    files: Iterable[Path],
    settings: Mapping[str, Any],
    pieces: Callable[[Path, str], Iterator[Piece]],
) -> StoredTokens:
    """The tokens of all files, from the cache.

    settings: what they depend on besides the files. pieces: makes those of a file with the given digest.
    """
    cache = TokenCache(user_cache("tokens") if spec.cache is None else Path(spec.cache))
    digests, size = [], 0
    for path in files:
        with reading(path):
            digests.append((path, cache.digest_of(path)))
            size += path.stat().st_size
    if not size:
        raise DataError(f"data.path={spec.path}: is empty")

    def all_pieces() -> Iterator[Piece]:
        is_empty = True
        for path, digest in digests:
            for piece in pieces(path, digest):
                is_empty = is_empty and not piece.tokens
                yield piece
        if is_empty:
            raise DataError(f"data.path={spec.path}: is empty")

    key = {**settings, "version": _VERSION, "sources": [digest for _, digest in digests]}
    return cache.get(key, all_pieces)


def encode_documents(tokenizer: DocumentTokenizer, texts: Iterable[TextPiece]) -> Iterator[Piece]:
    begins = True
    for group in _groups(texts):
        for text, tokens in zip(
            group, tokenizer.encode_pieces([text.content for text in group]), strict=True
        ):
            prefix = tokenizer.prefix if begins else ()
            suffix = tokenizer.suffix if text.ends_document else ()
            yield Piece(array("i", (*prefix, *tokens, *suffix)), text.ends_document)
            begins = text.ends_document


def _groups(texts: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Pieces to encode together, because a tokenizer does it in parallel."""
    group: list[TextPiece] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text.content)
        if size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def stream_data(
    spec: TokenSpec, stream: Tensor, tokenizer: DocumentTokenizer, stride: int, ends: Tensor | None = None
) -> Data:
    """Windows of a stream of tokens; the last of them are held out.

    Held-out windows do not overlap, so that the model predicts each of those tokens once.
    ends: where each document ends; None for a stream that is one document.
    """
    held_out = max(round(len(stream) * spec.held_out), spec.context + 1)
    return _packed_data(spec, stream, len(stream) - held_out, tokenizer, stride, ends)


def document_data(spec: TokenSpec, stored: StoredTokens, tokenizer: DocumentTokenizer) -> Data:
    """Samples of documents, of which the last are held out."""
    ends, first_scored = stored.documents.unbind(1)
    if spec.pack:
        split = len(ends) - _held_out_documents(spec, len(ends))
        return _packed_data(spec, stored.tokens, int(ends[split - 1]), tokenizer, spec.context, ends)
    if tokenizer.padding is None:
        raise ConfigError(
            "data.pack=false: the tokenizer has neither a pad token nor an eos token to pad with; name one with "
            "data.eos_token=TOKEN"
        )
    # A document whose first scored token is cut off teaches nothing.
    used = (first_scored <= spec.context).nonzero().squeeze(1)
    if not len(used):
        raise DataError(
            f"data.path={spec.path}: no sample has a token to score within data.context={spec.context}"
        )
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    spans = torch.stack([begins, ends], 1)[used]
    split = len(spans) - _held_out_documents(spec, len(spans))
    cut = int((spans[:, 1] - spans[:, 0] > spec.context + 1).sum())
    notes = []
    if cut:
        notes.append(f"data.context={spec.context}: {cut} of {len(spans)} samples are longer and were cut")
    if left_out := len(ends) - len(spans):
        notes.append(
            f"data.path={spec.path}: {left_out} of {len(ends)} samples have no token to score and were left out"
        )
    train, test = (
        PaddedSamples(stored.tokens, part, spec.context, tokenizer.padding)
        for part in (spans[:split], spans[split:])
    )
    return _data(spec, train, test, tokenizer, tuple(notes))


def _held_out_documents(spec: TokenSpec, documents: int) -> int:
    if documents < 2:
        raise DataError(
            f"data.path={spec.path}: has {documents} sample, but one to train on and one to hold out are needed"
        )
    return min(max(round(documents * spec.held_out), 1), documents - 1)


def _packed_data(
    spec: TokenSpec,
    stream: Tensor,
    split: int,
    tokenizer: DocumentTokenizer,
    stride: int,
    ends: Tensor | None,
) -> Data:
    """split: where the held-out tokens begin."""
    if spec.pack == JOINED or (ends is not None and len(ends) < 2):
        ends = None
    if min(split, len(stream) - split) <= spec.context:
        unit = "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokens"
        raise DataError(
            f"data.path={spec.path}: {len(stream)} {unit} are too few to train on and to hold out windows of "
            f"{spec.context}; give a longer text or a smaller data.context"
        )
    train = PackedSamples(stream[:split], spec.context, stride, ends)
    test = PackedSamples(stream[split:], spec.context, spec.context, ends, split)
    return _data(spec, train, test, tokenizer)


def _data(
    spec: TokenSpec,
    train: PackedSamples | PaddedSamples,
    test: PackedSamples | PaddedSamples,
    tokenizer: DocumentTokenizer,
    notes: tuple[str, ...] = (),
) -> Data:
    return Data(
        train,
        test,
        classes=tokenizer.vocabulary,
        shape=(spec.context,),
        tokenizer=tokenizer,
        notes=notes,
    )


@final
class PackedSamples:
    """A window of `context` tokens every `stride` tokens of a stream.

    stream: [length], integers; those that are not scored are stored as their complement.
    ends: where documents end, counted from `first` places before the stream; None: a window is a single document.
    """

    def __init__(
        self, stream: Tensor, context: int, stride: int, ends: Tensor | None = None, first: int = 0
    ) -> None:
        self._windows = stream.unfold(0, context + 1, stride)
        self._stride, self._first = stride, first
        self._ends = None if ends is None else ends.contiguous()

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[ModelInput, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return map_tensors(lambda tensor: tensor[0], inputs), targets[0]

    def batch(self, indices: Tensor) -> tuple[ModelInput, Tensor]:
        windows = self._windows.index_select(0, indices).long()
        tokens, targets = token_of(windows[:, :-1]), target_of(windows[:, 1:])
        if self._ends is None:
            return tokens, targets
        places = torch.arange(windows.shape[1]) + self._first + indices.unsqueeze(1) * self._stride
        document = torch.searchsorted(self._ends, places, right=True)
        # A document that began before the window counts from the beginning of the window.
        begins = self._ends[(document - 1).clamp(min=0)].where(document > 0, 0).maximum(places[:, :1])
        targets = targets.masked_fill(document[:, 1:] != document[:, :-1], IGNORED_LABEL)
        return {"input_ids": tokens, POSITIONS: (places - begins)[:, :-1]}, targets


@final
class PaddedSamples:
    """One document per sample: longer ones are cut after `context` + 1 tokens, shorter ones padded at their end."""

    def __init__(self, stream: Tensor, spans: Tensor, context: int, padding: int) -> None:
        """spans: [samples, 2], where each document begins and ends in the stream. padding: the token for it."""
        self._stream, self._spans, self._context, self._padding = stream, spans, context, padding

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return {name: tensor[0] for name, tensor in inputs.items()}, targets[0]

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shape = (len(indices), self._context)
        tokens = torch.full(shape, self._padding)
        mask = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORED_LABEL)
        for row, (begin, end) in enumerate(self._spans.index_select(0, indices).tolist()):
            document = self._stream[begin : min(end, begin + self._context + 1)].long()
            length = len(document) - 1
            tokens[row, :length] = token_of(document[:-1])
            mask[row, :length] = 1
            targets[row, :length] = target_of(document[1:])
        return {"input_ids": tokens, "attention_mask": mask}, targets


def token_of(stored: Tensor) -> Tensor:
    return torch.where(stored < 0, ~stored, stored)


def target_of(stored: Tensor) -> Tensor:
    return stored.masked_fill(stored < 0, IGNORED_LABEL)
