from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from gpipe_cli.data.documents import PIECE_BYTES, document_pieces, find_files
from gpipe_cli.data.texts import build_text_files
from gpipe_cli.data.tokenizer import ByteTokenizer, ChatError, FileTokenizer, read_tokenizer
from gpipe_cli.errors import ConfigError, DataError
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


def test_bytes_are_tokens_and_come_back() -> None:
    text = "naïve 日本\n"
    tokens = ByteTokenizer().encode(text)
    assert tokens == list(text.encode()) and ByteTokenizer().decode(tokens) == text


def test_half_a_character_is_replaced_and_tokens_beyond_the_bytes_are_left_out() -> None:
    assert ByteTokenizer().decode([104, 195]) == "h\ufffd"
    assert ByteTokenizer().decode([104, 300, 105]) == "hi"


def test_bytes_of_a_command_line_that_are_not_utf_8_are_kept() -> None:
    assert ByteTokenizer().encode("a\udcff") == [97, 255]


def test_a_file_alone_has_no_end_and_a_directory_says_it(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, bos=True, eos_token="<|endoftext|>", pad_token="<|im_end|>")
    bare, whole = read_tokenizer(str(folder / "tokenizer.json")), read_tokenizer(str(folder))
    assert (bare.prefix, bare.suffix, bare.ends, bare.padding) == ((3,), (), frozenset(), None)
    assert (whole.prefix, whole.suffix, whole.ends, whole.padding) == ((3,), (0,), frozenset({0}), 2)
    assert bare.encode("thee é") == whole.encode("thee é") and bare.start == whole.start == 3
    assert whole.decode([*whole.encode("thee é"), 0]) == "thee é"
    assert whole.decode(whole.encode("a\udcff")) == "a\ufffd"
    assert bare.digest != whole.digest


def test_a_text_has_the_tokens_of_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_tokenizer(tmp_path / "tokenizer", eos_token="<|endoftext|>")
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(
            f"{name}: shall I compare thee to a summer's day?\n" * 9, encoding="utf-8"
        )
    data = build_text_files(str(tmp_path / "*.txt"), 8, tokenizer=str(folder))
    tokenizer = read_tokenizer(str(folder))
    stream = [
        token for name in "ab" for token in (*tokenizer.encode((tmp_path / f"{name}.txt").read_text()), 0)
    ]
    inputs = [
        token for index in range(len(data.train)) for token in data.train[index][0]["input_ids"].tolist()
    ]  # type: ignore[union-attr]
    assert inputs == stream[: len(inputs)] and len(inputs) + 9 > 0.85 * len(stream)
    assert data.classes == tokenizer.vocabulary and data.tokenizer is not None
    single = build_text_files(str(tmp_path / "*.txt"), 8, pack=False, tokenizer=str(folder))
    assert (len(single.train), len(single.test)) == (1, 1)
    several = build_text_files(str(tmp_path / "*.txt"), 8)
    assert several.classes == 256 and bytes(several.train[0][0]["input_ids"].tolist()) == b"a.txt: s"  # type: ignore[union-attr]


@pytest.mark.parametrize("line", [b"a line\n", b"word ", "é".encode(), b"x"])
def test_long_texts_are_divided_between_lines_words_or_characters(line: bytes) -> None:
    content = line * (5 * PIECE_BYTES // (2 * len(line)))
    rest = [content]

    def read(size: int) -> bytes:
        block, rest[0] = rest[0][:size], rest[0][size:]
        return block

    pieces = list(document_pieces(read))
    assert b"".join(piece.content for piece in pieces) == content
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) in (3, 4) and all(len(piece.content) < 2 * PIECE_BYTES for piece in pieces)
    for piece in pieces:
        piece.content.decode()


def test_a_pattern_without_a_match_is_named(tmp_path: Path) -> None:
    (tmp_path / "x[1].txt").touch()
    assert find_files(str(tmp_path / "x[1].txt")) == [tmp_path / "x[1].txt"]
    with pytest.raises(DataError, match=r"data\.path=.*\*\.json: no file matches"):
        find_files(str(tmp_path / "*.json"))


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer=nowhere: no such file or directory; gpipe downloads noth"
    ):
        read_tokenizer("nowhere")
    (tmp_path / "broken.json").write_text('{"model":')
    with pytest.raises(ConfigError, match=r"broken\.json: is not a tokenizer\.json: .*EOF"):
        read_tokenizer(str(tmp_path / "broken.json"))
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps({"a": 1}))
    for path in (tmp_path / "tokenizer.pkl", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"data.tokenizer={path}: is not a tokenizer.json"):
            read_tokenizer(str(path))
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json and no vocabulary .*; gpipe reads no pickled token"
    ):
        read_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no tokenizer that transformers can load"):
        read_tokenizer(str(tmp_path))


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
