"""Which tokens of a conversation are the assistant's, for templates of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.data.chat import ChatError
from gpipe_cli.data.tokenizer import FileTokenizer, read_tokenizer
from tests.support.tokenizers import CHATML, save_tokenizer

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
WITHOUT_PROMPT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
)
INSTRUCT = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
THINKS_IN_PROMPT = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
FORGETS = "{% for message in messages[-2:] %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
SILENT = "{% for message in messages %}{{ message.role }}<|im_end|>{% endfor %}"
STRICT = "{{ raise_exception('roles must alternate') }}"
MESSAGES = [
    {"role": "user", "content": "compare thee?"},
    {"role": "assistant", "content": "a summer's day"},
    {"role": "user", "content": "assistant: a"},
    {"role": "assistant", "content": "a"},
]


def tokenizer_with(folder: Path, template: str) -> FileTokenizer:
    return read_tokenizer(str(save_tokenizer(folder, eos_token="<|im_end|>", chat_template=template)))


def parts(tokenizer: FileTokenizer, messages: object) -> list[str]:
    """The text of each run of scored tokens."""
    assert tokenizer.chat is not None
    runs: list[list[int]] = [[]]
    for token in tokenizer.chat.encode(messages):
        if token >= 0:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    backend = tokenizer._backend
    return [backend.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.mark.parametrize(
    ("template", "space"),
    [(CHATML, ""), (MARKED, ""), (WITHOUT_PROMPT, " "), (INSTRUCT, " "), (THINKS_IN_PROMPT, "")],
    ids=["prompt", "markers", "no prompt", "instruct", "prompt begins the answer"],
)
def test_only_what_the_assistant_says_is_scored(tmp_path: Path, template: str, space: str) -> None:
    """A token of these tokenizers includes the space before a word."""
    tokenizer = tokenizer_with(tmp_path, template)
    assert parts(tokenizer, MESSAGES) == [f"{space}a summer's day<|im_end|>", f"{space}a<|im_end|>"]
    assert parts(tokenizer, MESSAGES[:3]) == [f"{space}a summer's day<|im_end|>"]
    assert parts(tokenizer, MESSAGES[1:2]) == [f"{space}a summer's day<|im_end|>"]
    assert parts(tokenizer, MESSAGES[:1]) == []


def test_all_tokens_are_those_of_the_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML)
    assert tokenizer.chat is not None
    stored = tokenizer.chat.encode(MESSAGES[:2])
    text = tokenizer._backend.decode([max(token, ~token) for token in stored], skip_special_tokens=False)
    expected = "<|im_start|>user\ncompare thee?<|im_end|>\n<|im_start|>assistant\na summer's day<|im_end|>\n"
    assert text == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (FORGETS, "renders the messages up to message 2 differently if others follow.* markers"),
        (SILENT, "does not show where the answer in message 2 begins; use a template with .* markers"),
        (STRICT, "the chat template cannot render the messages: roles must alternate"),
    ],
)
def test_a_template_that_hides_the_answers_is_refused(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        parts(tokenizer_with(tmp_path, template), MESSAGES)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "must be a list of messages with role and content"),
        (["hello"], "message 1 has no role; each message needs a role and a content"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 2 has no role"),
        ([{"role": "user"}], "message 1 has no content, which must be a text"),
        ([{"role": "user", "content": 3}], "message 1 has no content, which must be a text"),
    ],
)
def test_messages_without_role_or_content_are_refused(tmp_path: Path, messages: object, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        parts(tokenizer_with(tmp_path, CHATML), messages)
