from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.text import plain


@given(st.text())
def test_no_control_character_survives(text: str) -> None:
    shown = plain(text)
    assert not any(
        unicodedata.category(one).startswith("C") and unicodedata.category(one) != "Cn" for one in shown
    )
    assert len(shown.splitlines()) <= 1
    assert plain(shown) == shown


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P"])))
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert plain(text) == text


def test_escape_sequences_lose_their_power_and_lines_become_one() -> None:
    assert plain("a\x1b[31mb\r\n\tc\u202ed\u2028e\x9bf") == "a[31mb cd ef"
