"""Conversations as tokens, with those of the assistant marked as the ones to learn.

Some chat templates mark what the assistant says with {% generation %}. For the others the answer to some messages is
what the template appends to their text if the answer follows them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

ASSISTANT = "assistant"
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SENTINEL = "gpipe-7d0c1e5b"
"""Stands in for an answer, to see where the template puts it."""

Message = Mapping[str, Any]


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
