"""SVG files that can be read on a light and on a dark page.

The background is the page's own, so text beside the boxes is of a grey that has contrast to both, and text inside a box
is white on a colour of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpipe_cli.report.page.html import Html, join, tag

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #7b838d; }
.inside { fill: #fff; text-anchor: middle; dominant-baseline: central; font-size: 11px; }
.strong { font-weight: 600; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.forward { fill: #3b7dd8; } .forward1 { fill: #234f91; }
.backward { fill: #2f9e5b; } .backward1 { fill: #1c6b3c; }
.weights { fill: #7d5fc4; } .recompute { fill: #c2820e; }
.idle { fill: #808890; fill-opacity: .14; }
.layer { fill: #3b7dd8; } .stashing { fill: #7d5fc4; }
.partition { fill: #808890; fill-opacity: .14; stroke: #7b838d; stroke-opacity: .5; }
.arrow { fill: none; stroke: #7b838d; stroke-width: 1.5; }
.skip { fill: none; stroke: #a283ee; stroke-width: 2; }
.head { fill: #7b838d; } .skiphead { fill: #a283ee; }
"""


def frame(width: float, height: float, alternative: str, elements: Iterable[Html]) -> str:
    """The whole file; alternative: the text for readers who cannot see it."""
    attributes: dict[str, str | float] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": width,
        "height": height,
        "role": "img",
        "aria-label": alternative,
    }
    # One element per line, so that a change is a readable diff.
    lines = join([Html(f"{element.source}\n") for element in elements])
    return (
        tag(
            "svg", attributes, tag("title", None, alternative), Html(f"<style>{STYLE}</style>\n"), lines
        ).source
        + "\n"
    )


def box(
    kind: str, x: float, y: float, width: float, height: float, inside: str = "", *, round: float = 0
) -> Html:
    attributes: dict[str, str | float] = {
        "class": kind,
        "x": x,
        "y": y,
        "width": width,
        "height": height,
        "rx": round,
    }
    if not inside:
        return tag("rect", attributes)
    return join([tag("rect", attributes), label(inside, x + width / 2, y + height / 2, "inside")])


def label(text: str, x: float, y: float, kind: str = "") -> Html:
    return tag("text", {"class": kind, "x": x, "y": y} if kind else {"x": x, "y": y}, text)
