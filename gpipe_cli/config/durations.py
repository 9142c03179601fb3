"""Lengths of time as people write them: 90, 90s, 30m, 2h, 1h30m."""

from __future__ import annotations

import re

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
_FORM = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def seconds(text: str) -> float | None:
    """How long that is; None for what is no length of time, or none at all."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    parts = zip(match.groups(), _UNITS.values(), strict=True)
    return sum(float(number) * unit for number, unit in parts if number is not None) or None
