"""A data set of documents: their tokens from the cache, divided into samples to train on and held-out ones.

Samples are packed into windows without gaps, or one document each, padded to one length. A sample has one token more
than its input: the target is the input one token later. A target that is not scored is -100. Packed documents do not
see each other: positions begin at 0 in each of them, models derive their masks from that, and the target after the end
of a document is not scored. Memory is mapped, so a batch reads only its own samples from the disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from gpipe_cli.data.datasets import DEFAULT_FRACTION, Data
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
    held_out: float | None
    """None: a tenth, or for texts with labels what data.validation says."""
    cache: str | None

    def __post_init__(self) -> None:
        check_whole_number("data.context", self.context, least=1)
        if self.held_out is not None:
            check_held_out(self.held_out)
        if not isinstance(self.pack, bool) and self.pack != JOINED:
            raise ConfigError(f"data.pack={self.pack}: must be true, false or {JOINED}")

    @property
    def share(self) -> float:
        return DEFAULT_FRACTION if self.held_out is None else self.held_out


def check_held_out(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(f"data.held_out={fraction}: must be between 0 and 1")


def stored_tokens(
    spec: TokenSpec,
    files: Iterable[Path],
    settings: Mapping[str, Any],
    pieces: Callable[[Path, str], Iterator[Piece]],
    held_out: Sequence[Path] = (),
) -> StoredTokens:
    """The tokens of all files, from the cache.

    settings: what they depend on besides the files. pieces: makes those of a file with the given digest.
    held_out: the files to evaluate on.
    """
    cache = TokenCache(user_cache("tokens") if spec.cache is None else Path(spec.cache))
    digests, size = [], 0
    for path in (*files, *held_out):
        with reading(path):
            digests.append((path, cache.digest_of(path)))
            size += path.stat().st_size
    if not size:
        raise DataError(f"data.path={spec.path}: is empty")

    def all_pieces() -> Iterator[Piece]:
        is_empty = True
        for number, (path, digest) in enumerate(digests):
            for piece in pieces(path, digest):
                is_empty = is_empty and not piece.tokens
                yield replace(piece, is_held_out=True) if number >= len(digests) - len(held_out) else piece
        if is_empty:
            raise DataError(f"data.path={spec.path}: is empty")

    key = {**settings, "version": _VERSION, "sources": [digest for _, digest in digests]}
    if held_out:
        key["held_out"] = len(held_out)
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
    held_out = max(round(len(stream) * spec.share), spec.context + 1)
    return _packed_data(spec, stream, len(stream) - held_out, tokenizer, stride, ends)


def document_data(spec: TokenSpec, stored: StoredTokens, tokenizer: DocumentTokenizer) -> Data:
    """Samples of documents, of which the last are held out."""
    ends, first_scored = stored.documents.unbind(1)
    if spec.pack:
        split = _held_out_from(spec, len(ends), stored.trained)
        return _packed_data(spec, stored.tokens, int(ends[split - 1]), tokenizer, spec.context, ends)
    padding = _padding("data.pack=false", tokenizer)
    # A document whose first scored token is cut off teaches nothing.
    used = (first_scored <= spec.context).nonzero().squeeze(1)
    if not len(used):
        raise DataError(
            f"data.path={spec.path}: no sample has a token to score within data.context={spec.context}"
        )
    spans = _spans(ends)[used]
    trained = None if stored.trained is None else int((used < stored.trained).sum())
    split = _held_out_from(spec, len(spans), trained)
    notes = _cut_note(spec, spans, spec.context + 1)
    if left_out := len(ends) - len(spans):
        notes.append(
            f"data.path={spec.path}: {left_out} of {len(ends)} samples have no token to score and were left out"
        )
    train, test = (
        PaddedSamples(stored.tokens, part, spec.context, padding) for part in (spans[:split], spans[split:])
    )
    return _data(spec, train, test, tokenizer, tuple(notes))


def labeled_data(
    spec: TokenSpec, stored: StoredTokens, tokenizer: DocumentTokenizer, label: str, labels: Sequence[str]
) -> Data:
    """Texts with a class each.

    label: the field of the classes. labels: their names in order; if there are none, all that training has, sorted.
    """
    ends, found = stored.documents.unbind(1)
    holds_out = spec.held_out is not None or stored.trained is not None
    split = _held_out_from(spec, len(ends), stored.trained) if holds_out else len(ends)
    occurring = [stored.labels[number] for number in sorted({*found[:split].tolist()})]
    names = list(labels) or sorted(occurring, key=lambda name: (len(name) if _is_whole(name) else 0, name))
    if len(names) < 2:
        raise DataError(
            f"data.label={label}: every text has the label {names[0]}, so there is nothing to learn"
        )
    known = torch.tensor([names.index(name) if name in names else -1 for name in stored.labels])
    targets = known[found]
    if len(unknown := (targets < 0).nonzero()):
        name, place = stored.labels[int(found[unknown[0]])], "data.labels" if labels else "the training texts"
        raise DataError(
            f"data.label={label}: text {int(unknown[0]) + 1} has the label {name}, which {place} do not have: "
            f"{', '.join(names[:8])}"
        )
    special = len(tokenizer.prefix) + len(tokenizer.closing)
    if spec.context <= special:
        raise ConfigError(
            f"data.context={spec.context}: the tokenizer itself adds {special} tokens; give more"
        )
    spans = _spans(ends)
    make = partial(LabeledTexts, stored.tokens, _padding(f"data.label={label}", tokenizer), tokenizer.closing)
    return Data(
        make(spans[:split], targets[:split], spec.context),
        make(spans[split:], targets[split:], spec.context) if holds_out else None,
        classes=len(names),
        shape=(spec.context,),
        tokenizer=tokenizer,
        notes=tuple(_cut_note(spec, spans, spec.context)),
        class_names=tuple(names),
    )


def _is_whole(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _padding(key: str, tokenizer: DocumentTokenizer) -> int:
    if tokenizer.padding is None:
        raise ConfigError(
            f"{key}: the tokenizer has neither a pad token nor an eos token to pad with; name one with "
            "data.eos_token=TOKEN"
        )
    return tokenizer.padding


def _spans(ends: Tensor) -> Tensor:
    """Where each document begins and ends."""
    return torch.stack([torch.cat([ends.new_zeros(1), ends[:-1]]), ends], 1)


def _cut_note(spec: TokenSpec, spans: Tensor, longest: int) -> list[str]:
    cut = int((spans[:, 1] - spans[:, 0] > longest).sum())
    return (
        [f"data.context={spec.context}: {cut} of {len(spans)} samples are longer and were cut"] if cut else []
    )


def _held_out_from(spec: TokenSpec, documents: int, trained: int | None) -> int:
    """The index of the first document to hold out; trained: how many documents the files to train on have."""
    if documents < 2 or trained in (0, documents):
        raise DataError(
            f"data.path={spec.path}: has {documents} sample{'s' if documents != 1 else ''}, but one to train on "
            "and one to hold out are needed"
        )
    return (
        documents - min(max(round(documents * spec.share), 1), documents - 1) if trained is None else trained
    )


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


def _one_sample(
    batch: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], index: int
) -> tuple[dict[str, Tensor], Tensor]:
    inputs, targets = batch(torch.tensor([index]))
    return {name: tensor[0] for name, tensor in inputs.items()}, targets[0]


@final
class PaddedSamples:
    """One document per sample: longer ones are cut after `context` + 1 tokens, shorter ones padded at their end."""

    def __init__(self, stream: Tensor, spans: Tensor, context: int, padding: int) -> None:
        """spans: [samples, 2], where each document begins and ends in the stream. padding: the token for it."""
        self._stream, self._spans, self._context, self._padding = stream, spans, context, padding

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return _one_sample(self.batch, index)

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        texts = [
            self._stream[begin : min(end, begin + self._context + 1)].long()
            for begin, end in self._spans.index_select(0, indices).tolist()
        ]
        targets = torch.full((len(indices), self._context), IGNORED_LABEL)
        for row, text in enumerate(texts):
            targets[row, : len(text) - 1] = target_of(text[1:])
        return padded([token_of(text[:-1]) for text in texts], self._context, self._padding), targets


@final
class LabeledTexts:
    """Texts with a class each: shorter ones are padded at their end, longer ones cut before their last tokens."""

    def __init__(
        self,
        stream: Tensor,
        padding: int,
        closing: Sequence[int],
        spans: Tensor,
        targets: Tensor,
        context: int,
    ) -> None:
        self._stream, self._padding, self._closing = stream, padding, closing
        self._spans, self.targets, self._context = spans, targets, context

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return _one_sample(self.batch, index)

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        spans = self._spans.index_select(0, indices).tolist()
        texts = [cut(self._stream[begin:end], self._context, self._closing) for begin, end in spans]
        return padded(texts, self._context, self._padding), self.targets.index_select(0, indices)


def cut(text: Tensor, context: int, closing: Sequence[int]) -> Tensor:
    """The first tokens of a text, which ends with the closing ones."""
    kept = text[:context].clone()
    kept[len(kept) - len(closing) :] = text[len(text) - len(closing) :]
    return kept


def padded(texts: Sequence[Tensor], length: int, padding: int) -> dict[str, Tensor]:
    """The input of a model for these tokens, each filled up at its end."""
    tokens = torch.full((len(texts), length), padding)
    mask = torch.zeros((len(texts), length), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def token_of(stored: Tensor) -> Tensor:
    return torch.where(stored < 0, ~stored, stored)


def target_of(stored: Tensor) -> Tensor:
    return stored.masked_fill(stored < 0, IGNORED_LABEL)
