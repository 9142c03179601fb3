from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.values import exact_bytes, flatten, format_bytes, parse_bytes, parse_duration


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
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "11XB", "-1GiB", "0", "1e9", "nan", "11 G iB", None, True, [1]])
def test_anything_else_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes such as 11GiB"):
        parse_bytes(text)


@given(st.integers(1, 2**45))
def test_what_is_shown_is_enough_and_hardly_too_much(count: int) -> None:
    assert count <= parse_bytes(format_bytes(count)) <= 1.01 * count + 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("0.5", 0.5),
        ("30m", 1800.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("1h30m5s", 5405.0),
        ("0", None),
        ("", None),
        ("soon", None),
        ("2 h", None),
        ("30m1h", None),
        ("-1", None),
        ("2d", None),
    ],
)
def test_lengths_of_time_are_read_as_people_write_them(text: str, expected: float | None) -> None:
    assert parse_duration(text) == expected


def test_a_nested_mapping_becomes_dotted_keys() -> None:
    tree = {"a": {"b": 1, "c": {}}, "d": None, "e": [{"f": 2}]}
    assert dict(flatten(tree)) == {"a.b": 1, "d": None, "e": [{"f": 2}]}
    inner = {"a": tree["a"], "a.c": {}, "e[0]": {"f": 2}, "e[0].f": 2}
    assert dict(flatten(tree, inner=True)) == {**dict(flatten(tree)), **inner}


@pytest.mark.parametrize(
    ("count", "text"), [(80 * 2**30, "80GiB"), (2**20 + 2**10, "1049600"), (85899345921, "85899345921")]
)
def test_a_limit_in_a_command_is_the_very_number(count: int, text: str) -> None:
    assert exact_bytes(count) == text and parse_bytes(text) == count
