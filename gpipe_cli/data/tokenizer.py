"""Text to tokens and back, as data sets of text and `gpipe generate` use it: by bytes, or by a tokenizer in files.

In files means a tokenizer.json, or a directory as transformers saves it, with the chat template. A tokenizer.json alone
needs only the package tokenizers. It does not say which tokens begin and end a text or pad it; tokenizer_config.json in
the directory does. Nothing is downloaded, unpickled or run.

A conversation becomes tokens with those of the assistant marked as the ones to learn. Some chat templates mark what the
assistant says with {% generation %}. For the others the answer to some messages is what the template appends to their
text if the answer follows them.
"""

from __future__ import annotations

import importlib
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self, final

from gpipe_cli import huggingface
from gpipe_cli.errors import ConfigError
from gpipe_cli.safe_files import read_regular

ASSISTANT = "assistant"
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SENTINEL = "gpipe-7d0c1e5b"
"""Stands in for an answer, to see where the template puts it."""
Message = Mapping[str, Any]
_MAX_BYTES = 2**28
_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
"""The suffixes of the files that make up a tokenizer."""


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
    def closing(self) -> tuple[int, ...]:
        """The part of `suffix` that the tokenizer puts behind every text, also where nothing is to be generated."""

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
    closing: tuple[int, ...] = ()
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


@final
class FileTokenizer:
    """A `Tokenizer` and a `DocumentTokenizer`."""

    def __init__(
        self,
        backend: Any,
        digest: str,
        *,
        bos: int | None = None,
        eos: int | None = None,
        padding: int | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """backend: a tokenizers.Tokenizer."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.digest, self.chat = digest, chat
        self.vocabulary = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.prefix, self.closing = _special_tokens(backend)
        self.suffix = self.closing + (() if eos is None or self.closing[-1:] == (eos,) else (eos,))
        self.start = next(iter(self.prefix), bos)
        self.ends = frozenset(() if eos is None else (eos,))
        self.padding = eos if padding is None else padding

    def encode(self, text: str) -> list[int]:
        # A command line may contain bytes that are not UTF-8, which Python represents by surrogates.
        piece = text.encode(errors="surrogateescape").decode(errors="replace")
        return [*self.prefix, *self._backend.encode(piece, add_special_tokens=False).ids]

    def encode_pieces(self, pieces: Sequence[bytes]) -> list[list[int]]:
        texts = [piece.decode() for piece in pieces]
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text


def read_tokenizer(path: str, eos_token: str | None = None) -> FileTokenizer:
    """eos_token: the token that ends a text, instead of the tokenizer's own."""
    key, location = f"data.tokenizer={path}", Path(path)
    tokenizer = _read_directory(location, key) if location.is_dir() else None
    backend = _read_backend(location, key) if tokenizer is None else tokenizer.backend_tokenizer
    if not backend.get_vocab_size():
        raise ConfigError(f"{key}: has no tokens")
    eos = None if tokenizer is None else tokenizer.eos_token_id
    if eos_token is not None:
        eos = backend.token_to_id(eos_token)
        if eos is None:
            raise ConfigError(f"data.eos_token={eos_token}: is not a token of {path}")
    digest = _digest(location)
    if tokenizer is None:
        return FileTokenizer(backend, digest, eos=eos)
    return FileTokenizer(
        backend,
        digest,
        bos=tokenizer.bos_token_id,
        eos=eos,
        padding=tokenizer.pad_token_id,
        chat=ChatTemplate.of(tokenizer),
    )


def _read_directory(directory: Path, key: str) -> Any:
    if not huggingface.has_tokenizer(directory):
        vocabularies = ", ".join(huggingface.VOCABULARIES[1:])
        raise ConfigError(
            f"{key}: has no tokenizer.json and no vocabulary ({vocabularies}); gpipe reads no pickled "
            "tokenizers, save it again with `save_pretrained`"
        )
    tokenizer = huggingface.load_tokenizer(directory)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}: is a {type(tokenizer).__name__}, which is not available as a tokenizer.json; choose another one"
        )
    return tokenizer


def _read_backend(path: Path, key: str) -> Any:
    # The default warns in every process that is forked after the first use of a tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        package = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"{key}: needs the package tokenizers; install it: {huggingface.INSTALL}"
        ) from error
    try:
        return package.Tokenizer.from_buffer(read_regular(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}: no such file or directory; gpipe downloads nothing, give a local tokenizer.json or its directory"
        ) from error
    except Exception as error:  # the package raises plain Exception for a damaged file
        raise ConfigError(f"{key}: is not a tokenizer.json: {' '.join(str(error).split())[:200]}") from error


def _digest(path: Path) -> str:
    """A digest of the tokenizer's files and of the version of the package that reads them."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    digest = blake2b(importlib.import_module("tokenizers").__version__.encode())
    for file in files:
        content = read_regular(file, _MAX_BYTES)
        digest.update(f"{file.name} {len(content)}\n".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _special_tokens(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after every text."""
    encoding = backend.encode("a", add_special_tokens=True)
    own = [place for place, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    if not own:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])


class ChatError(ValueError):
    """A conversation that cannot be used; the message says why."""


@final
class ChatTemplate:
    def __init__(self, tokenizer: Any, template: str) -> None:
        """tokenizer: one of transformers, of the kind that is based on a tokenizers.Tokenizer."""
        self._tokenizer = tokenizer
        self._is_marked = _MARKER.search(template) is not None

    @classmethod
    def of(cls, tokenizer: Any) -> Self | None:
        """None for a tokenizer without a template."""
        try:
            return cls(tokenizer, tokenizer.get_chat_template())
        except ValueError:
            return None

    def encode(self, messages: object) -> array[int]:
        """The tokens of a conversation; all but those of the assistant are stored as their complement."""
        checked = _checked(messages)
        if self._is_marked:
            encoded = self._apply(checked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            tokens, scored = encoded["input_ids"], encoded["assistant_masks"]
        else:
            text = self._render(checked)
            spans = [
                self._answer(checked, place, text)
                for place, message in enumerate(checked)
                if message["role"] == ASSISTANT
            ]
            encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            tokens = encoding.ids
            scored = [
                any(begin < span_end and end > span_begin for span_begin, span_end in spans)
                for begin, end in encoding.offsets
            ]
        return array("i", (token if own else ~token for token, own in zip(tokens, scored, strict=True)))

    def prompt(self, text: str) -> list[int]:
        """The tokens up to the answer to a message of a user."""
        try:
            rendered = self._render([{"role": "user", "content": text}], prompt=True)
        except ChatError as error:
            raise ConfigError(f"chat=true: {error}; give chat=false") from error
        tokens: list[int] = self._tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids
        return tokens

    def end(self) -> int | None:
        """The special token that the template puts behind an answer."""
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _SENTINEL}]
        try:
            after = self._render(messages).partition(_SENTINEL)[2]
        except ChatError:
            return None
        tokens = self._tokenizer.backend_tokenizer.encode(after, add_special_tokens=False).ids
        return next((token for token in tokens[:1] if token in self._tokenizer.added_tokens_decoder), None)

    def _answer(self, messages: Sequence[Message], place: int, text: str) -> tuple[int, int]:
        """Where the message of the assistant at `place` begins and ends in the text of the whole conversation."""
        before = self._render(messages[:place]) if place else ""
        through = text if place == len(messages) - 1 else self._render(messages[: place + 1])
        if not (text.startswith(through) and through.startswith(before)):
            raise ChatError(
                f"the chat template renders the messages up to message {place + 1} differently if others follow, so "
                "the answers cannot be told from the prompts; use a template with {% generation %} markers"
            )
        begin = self._beginning(messages, place, before, through)
        end_of_text = self._tokenizer.eos_token
        # What a template puts between the end of an answer and the next message is not the assistant's.
        cut = through.rfind(end_of_text, begin) + len(end_of_text) if end_of_text else 0
        return begin, cut if begin < cut and not through[cut:].strip() else len(through)

    def _beginning(self, messages: Sequence[Message], place: int, before: str, through: str) -> int:
        prompt = self._render(messages[:place], prompt=True) if place else ""
        if prompt != before and through.startswith(prompt):
            return len(prompt)
        # The template has no prompt for an answer, or one that also begins the answer.
        replaced = self._render([*messages[:place], {**messages[place], "content": _SENTINEL}])
        begin = replaced.find(_SENTINEL)
        if begin < 0 or replaced[:begin] != through[:begin]:
            raise ChatError(
                f"the chat template does not show where the answer in message {place + 1} begins; use a template with "
                "{% generation %} markers"
            )
        return begin

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """prompt: with what the template puts before an answer."""
        return str(self._apply(messages, tokenize=False, add_generation_prompt=prompt))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template may refuse a conversation, or fail in any way
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ChatError(f"the chat template cannot render the messages: {reason}") from error


def _checked(messages: object) -> Sequence[Message]:
    if not isinstance(messages, list) or not messages:
        raise ChatError("must be a list of messages with role and content")
    for number, message in enumerate(messages, 1):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not role:
            raise ChatError(f"message {number} has no role; each message needs a role and a content")
        content = message.get("content")
        # A call of a tool may come without words.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ChatError(f"message {number} has no content, which must be a text")
    return messages
