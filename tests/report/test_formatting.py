from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import ConfigError
from gpipe_cli.report.formatting import describe, format_value, one_line


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("top1", 0.98765, "98.77 %"),
        ("top5", 1.0, "100.00 %"),
        ("seconds", 61.25, "61.2 s"),
        ("parameters", 11181642, "11.18M"),
        ("parameters", "42520650", "42.52M"),
        ("parameters", 15200, "15.20k"),
        ("parameters", 116, "116"),
        ("backward_flops", 2_500_000_000, "2.50G"),
        ("saved_bytes", 3 * 2**20, "3.00 MiB"),
        ("parameter_bytes", 100 * 2**30, "100.00 GiB"),
        ("output_bytes", 40, "40 B"),
        ("share", "1.0 %", "1.0 %"),
        ("predicted_bubble", 0.25, "25.00 %"),
        ("loss", 0.123456789, "0.1235"),
        ("steps", 115, "115"),
        ("top1", None, "-"),
        ("run_dir", "runs/x", "runs/x"),
    ],
)
def test_a_fact_is_shown_by_its_name(name: str, value: Any, shown: str) -> None:
    assert format_value(name, value) == shown


@given(st.text())
def test_no_control_character_survives(text: str) -> None:
    shown = one_line(text)
    assert not any(
        unicodedata.category(character).startswith("C") and unicodedata.category(character) != "Cn"
        for character in shown
    )
    assert len(shown.splitlines()) <= 1
    assert one_line(shown) == shown


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert one_line(text) == text


def test_escape_sequences_lose_their_power_and_lines_become_one() -> None:
    assert one_line("a\x1b[31mb\r\n\tc\u202ed\u2028e\x9bf") == "a[31mb cd ef"


def test_an_error_of_ours_needs_no_type_and_any_other_does() -> None:
    assert describe(ConfigError("chunks=0: must be at least 1")) == "chunks=0: must be at least 1"
    assert describe(ValueError("no\nway")) == "ValueError: no way"
    assert describe(KeyError("lr")) == "KeyError: 'lr'"
    assert describe(RuntimeError()) == "RuntimeError"


def test_notes_say_where_it_happened() -> None:
    error = ZeroDivisionError("division by zero")
    error.add_note("in partition 1,\nlayer '\x1b2'")
    assert describe(error) == "ZeroDivisionError: division by zero (in partition 1, layer '2')"
