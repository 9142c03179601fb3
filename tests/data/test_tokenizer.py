from __future__ import annotations

from gpipe_cli.data.tokenizer import ByteTokenizer


def test_bytes_are_tokens_and_come_back() -> None:
    text = "naïve 日本\n"
    tokens = ByteTokenizer().encode(text)
    assert tokens == list(text.encode()) and ByteTokenizer().decode(tokens) == text


def test_half_a_character_is_replaced_and_tokens_beyond_the_bytes_are_left_out() -> None:
    assert ByteTokenizer().decode([104, 195]) == "h\ufffd"
    assert ByteTokenizer().decode([104, 300, 105]) == "hi"


def test_bytes_of_a_command_line_that_are_not_utf_8_are_kept() -> None:
    assert ByteTokenizer().encode("a\udcff") == [97, 255]
