"""Tables of the made pages show what they are given."""

from __future__ import annotations

from make_docs.markdown import code, table


def test_a_cell_may_hold_what_ends_a_cell_and_what_looks_like_an_element() -> None:
    rows = [["runs/<model>", code("a|b <c>")]]
    expected = "| x | y |\n| --- | --- |\n| runs/&lt;model> | `a\\|b <c>` |"
    assert table(["x", "y"], rows) == expected


def test_nothing_is_no_code() -> None:
    assert code("") == ""
