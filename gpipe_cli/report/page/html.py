"""HTML that is safe by construction: everything that `tag` did not make is text, and is escaped.

Names of elements and attributes are ours; contents and values may come from anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.formatting import printable

VOID_ELEMENTS = ("meta", "br", "img")


@final
@dataclass(frozen=True)
class Html:
    """A piece of a page that has been escaped."""

    source: str


Child = Html | str | None
"""Text is escaped, None is left out."""


def tag(name: str, attributes: Mapping[str, str | float] | None = None, *children: Child) -> Html:
    """An element of HTML or SVG. Numbers in attributes get two decimals: a screen shows no more."""
    rendered = "".join(f' {key}="{_attribute(value)}"' for key, value in (attributes or {}).items())
    if name in VOID_ELEMENTS:
        return Html(f"<{name}{rendered}>")
    return Html(f"<{name}{rendered}>{join(children).source}</{name}>")


def join(children: Iterable[Child]) -> Html:
    return Html("".join(_source(child) for child in children if child is not None))


def table(kind: str, headings: Iterable[str], rows: Iterable[Sequence[Child]]) -> Html:
    """A table that scrolls sideways on a narrow screen; kind: its CSS class."""
    head = tag("tr", None, *(tag("th", None, heading) for heading in headings))
    body = (tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in rows)
    content = tag("table", {"class": kind}, tag("thead", None, head), tag("tbody", None, *body))
    return tag("div", {"class": "scroll", "tabindex": "0"}, content)


def color_dot(css_class: str) -> Html:
    """A square of a run's or partition's color."""
    return tag("svg", {"class": "dot"}, tag("rect", {"class": css_class, "width": "100%", "height": "100%"}))


def _source(child: Html | str) -> str:
    return child.source if isinstance(child, Html) else html.escape(printable(child), quote=False)


def _attribute(value: str | float) -> str:
    return html.escape(printable(value)) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
