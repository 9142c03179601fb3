"""Keeps the values of environment variables out of files: a value from `${oc.env:NAME}` may be a secret.

Saved configurations keep the reference. Messages contain the value, so code that writes one to a file passes it
through `redacted`, which puts the reference back. The terminal shows the value.
"""

from __future__ import annotations

SHORTEST = 4
"""In characters. Replacing every `1` or `cpu` would make a log unreadable and hide nothing."""
_references: dict[str, str] = {}


def remember(name: str, value: object) -> None:
    """Hide the value of this environment variable from now on, unless it is a number or very short."""
    if isinstance(value, str) and len(value) >= SHORTEST and not _is_number(value):
        _references[value] = f"${{oc.env:{name}}}"


def redacted(text: str) -> str:
    for value in sorted(_references, key=len, reverse=True):
        text = text.replace(value, _references[value])
    return text


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
