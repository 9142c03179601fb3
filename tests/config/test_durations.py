from __future__ import annotations

import pytest

from gpipe_cli.config.durations import seconds


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
    assert seconds(text) == expected
