"""What all diagrams share: colors that are legible on a light and on a dark page, and the frame of an SVG file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from markupsafe import Markup

# The page's background shows through. Text beside the boxes is a grey with enough contrast to both white and black.
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
.area { fill: #3b7dd8; fill-opacity: .55; }
.skip { fill: none; stroke: #a283ee; stroke-width: 2; }
.head { fill: #7b838d; } .skiphead { fill: #a283ee; }
"""
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "weights": "weight gradients",
}


def tag(name: str, attributes: Mapping[str, str | float] | None = None, *children: str) -> Markup:
    """An element; texts are escaped, and numbers get two decimals."""
    rendered = Markup("").join(
        Markup(' {}="{}"').format(
            key, value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
        )
        for key, value in (attributes or {}).items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, rendered, Markup("").join(children))


def svg_file(width: float, height: float, description: str, elements: Iterable[Markup]) -> str:
    """The text of the file; screen readers read the description."""
    attributes: dict[str, str | float] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {width:g} {height:g}",
        "width": width,
        "height": height,
        "role": "img",
        "aria-label": description,
    }
    # One element per line keeps diffs readable.
    lines = Markup("").join(element + "\n" for element in elements)
    style = Markup("<style>{}</style>\n").format(Markup(STYLE))
    return f"{tag('svg', attributes, tag('title', None, description), style, lines)}\n"


def box(
    css_class: str, x: float, y: float, width: float, height: float, text: str = "", *, radius: float = 0
) -> Markup:
    geometry: dict[str, str | float] = {
        "class": css_class,
        "x": round(x, 2),
        "y": y,
        "width": round(width, 2),
        "height": height,
        "rx": radius,
    }
    if not text:
        return tag("rect", geometry)
    return tag("rect", geometry) + label(text, round(x + width / 2, 2), y + height / 2, "inside")


def label(text: str, x: float, y: float, css_class: str = "") -> Markup:
    return tag("text", {"class": css_class, "x": x, "y": y} if css_class else {"x": x, "y": y}, text)


def legend(phases: Iterable[str], right: float) -> Iterable[Markup]:
    """The colors of these phases, right-aligned."""
    shown = set(phases)
    meanings = {phase: meaning for phase, meaning in LEGEND.items() if phase in shown}
    widths = {phase: 6 * len(meaning) + 36 for phase, meaning in meanings.items()}
    x = right - sum(widths.values())
    for phase, meaning in meanings.items():
        yield box(phase, x, 5, 11, 11, radius=2)
        yield label(meaning, x + 16, 15)
        x += widths[phase]
