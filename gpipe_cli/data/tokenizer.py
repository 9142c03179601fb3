"""Text to tokens and back, as data sets of text and `gpipe generate` use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""

    @property
    def start(self) -> int | None:
        """The token that begins a text, to generate from an empty prompt; None if there is none."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text to continue: no token at its end says that the text ends there."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8, such as half a character, become U+FFFD."""


class DocumentTokenizer(Tokenizer, Protocol):
    """What data sets need in addition, to make tokens of whole documents."""

    @property
    def digest(self) -> str:
        """Two tokenizers with the same digest make the same tokens."""

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens at the start of each document."""

    @property
    def suffix(self) -> tuple[int, ...]:
        """The tokens at the end of each document."""

    @property
    def padding(self) -> int | None:
        """The token that fills a sample up; None if there is none."""

    def encode_pieces(self, pieces: Sequence[bytes]) -> Sequence[Sequence[int]]:
        """The tokens of each piece of text alone, without prefix and suffix; UnicodeDecodeError if it is not UTF-8."""


@final
class ByteTokenizer:
    """Every byte of the text in UTF-8 is a token; documents in any other encoding work too."""

    digest = "bytes"
    chat = None
    prefix: tuple[int, ...] = ()
    padding = 0
    vocabulary = 256
    start = ord("\n")
    ends: frozenset[int] = frozenset()

    def __init__(self, suffix: tuple[int, ...] = ()) -> None:
        self.suffix = suffix

    def encode(self, text: str) -> list[int]:
        # A command line may contain bytes that are not UTF-8, which Python represents by surrogates.
        return list(text.encode(errors="surrogateescape"))

    def encode_pieces(self, pieces: Sequence[bytes]) -> Sequence[bytes]:
        return pieces

    def decode(self, tokens: Sequence[int]) -> str:
        # A model may have a larger vocabulary than its data.
        return bytes(token for token in tokens if token < self.vocabulary).decode(errors="replace")
