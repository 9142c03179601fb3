"""Tables of the reference pages show the text they are given."""

from __future__ import annotations

from make_docs.reference import code, table


def test_a_cell_may_hold_a_bar_and_what_looks_like_an_html_element() -> None:
    rows = [["runs/<model>", code("a|b <c>")]]
    expected = "| x | y |\n| --- | --- |\n| runs/&lt;model> | `a\\|b <c>` |"
    assert table(["x", "y"], rows) == expected


def test_empty_text_has_no_backticks() -> None:
    assert code("") == ""
