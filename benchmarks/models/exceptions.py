"""The models that gpipe does not train, and why."""

from __future__ import annotations

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""By name and task."""
