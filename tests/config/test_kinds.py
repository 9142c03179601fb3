from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.config.kinds import mismatch


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1, int),
        (1, float),
        (1.5, float),
        (True, bool),
        ("x", str),
        (None, int | None),
        (0.1, float | torch.Tensor),
        ([1], list[int]),
        ([1, 2], tuple[int, int]),
        ([1], Sequence[int]),
        ({"a": 1}, dict[str, Any]),
        ("anything", Any),
        ("a/b", Path),
        (None, None),
    ],
)
def test_what_fits_passes(value: Any, annotation: Any) -> None:
    assert mismatch(value, annotation) is None


@pytest.mark.parametrize(
    ("value", "annotation", "says"),
    [
        ("x", int, "expected a whole number"),
        (1.5, int, "expected a whole number"),
        (True, int, "expected a whole number"),
        ("x", float, "expected a number"),
        (True, float, "expected a number"),
        (None, float, "expected a number"),
        ("x", float | torch.Tensor, "expected a number"),
        (1, bool, "expected true or false"),
        (1, str | None, "expected text or null"),
        (3, list[int], "expected a list such as [1,2]"),
        ([1], dict[str, int], "expected a mapping"),
    ],
)
def test_what_does_not_fit_is_told_in_plain_words(value: Any, annotation: Any, says: str) -> None:
    assert mismatch(value, annotation) == says
