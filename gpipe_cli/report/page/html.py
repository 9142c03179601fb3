"""HTML that is safe by construction: whatever is not made by `tag` is text, and is escaped.

Names of elements and attributes are ours; contents and values may come from anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.text import legible

__all__ = ["Child", "Html", "join", "tag"]

VOID = ("meta", "br")


@final
@dataclass(frozen=True)
class Html:
    """A piece of a page that has been escaped."""

    source: str


Child = Html | str | None
"""Text is escaped, None is left out."""


def tag(name: str, attributes: Mapping[str, str | float] | None = None, *children: Child) -> Html:
    """An element of HTML or SVG; numbers of an attribute keep as many digits as a screen can show."""
    given = "".join(f' {key}="{_attribute(value)}"' for key, value in (attributes or {}).items())
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(children).source}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """One after the other."""
    return Html("".join(_source(child) for child in children if child is not None))


def _source(child: Html | str) -> str:
    return child.source if isinstance(child, Html) else html.escape(legible(child), quote=False)


def _attribute(value: str | float) -> str:
    return html.escape(legible(value)) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
