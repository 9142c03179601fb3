"""Keeps values of environment variables out of files: what a configuration took from `${oc.env:NAME}` may be a secret.

Saved configurations keep the reference. Messages are about the value, so whoever writes one to a file passes it
through `redacted`, which puts the reference back. On the terminal the value is shown.
"""

from __future__ import annotations

__all__ = ["redacted", "remember"]

SHORTEST = 4
"""Characters: to replace every `1` or `cpu` in a log would make it unreadable, and hide nothing."""
_references: dict[str, str] = {}


def remember(name: str, value: object) -> None:
    """From now on, hide the value of the environment variable; numbers and very short words are left."""
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
