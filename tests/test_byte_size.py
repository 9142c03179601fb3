from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.byte_size import byte_count, byte_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("11GiB", 11 * 2**30),
        ("11 GB", 11 * 10**9),
        ("0.5MiB", 2**19),
        ("3kB", 3000),
        ("3KiB", 3072),
        ("4096", 4096),
        (4096, 4096),
        ("1TiB", 2**40),
        ("7B", 7),
        ("2gib", 2**31),
    ],
)
def test_units_are_understood(text: object, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "11XB", "-1GiB", "0", "1e9", "nan", "11 G iB", None, True, [1]])
def test_anything_else_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes such as 11GiB"):
        byte_count(text)


@given(st.integers(1, 2**45))
def test_what_is_shown_is_enough_and_hardly_too_much(count: int) -> None:
    assert count <= byte_count(byte_text(count)) <= 1.01 * count + 1
