"""The page itself: the parts in their order, a part that is missing with the command that makes it, style and script.

One file. The policy in its head allows the style and the script below by their digests and nothing else: no request
leaves the page, and no text in it can become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from gpipe_cli.report.page.bars import layer_table, partition_table
from gpipe_cli.report.page.curves import charts
from gpipe_cli.report.page.facts import Run
from gpipe_cli.report.page.headline import cards, comparison
from gpipe_cli.report.page.html import Child, Html, join, tag
from gpipe_cli.report.page.origins import differences, origin
from gpipe_cli.report.page.timelines import timelines

__all__ = ["GENERATOR", "PAGE", "page"]

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="gpipe">'
"""How a page of ours is told from another file of that name."""
PROFILE = "gpipe profile timeline=true"


def page(runs: Sequence[Run]) -> str:
    """Of one run, or of several to compare."""
    title = str(runs[0].path) if len(runs) == 1 else f"{len(runs)} runs compared"
    parts = _one(runs[0]) if len(runs) == 1 else _several(runs)
    head = join(
        [
            tag("meta", {"charset": "utf-8"}),
            tag("meta", {"http-equiv": "Content-Security-Policy", "content": _policy()}),
            tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
            Html(GENERATOR),
            tag("title", None, f"{title} · gpipe"),
            Html(f"<style>{_asset('style.css')}</style>"),
        ]
    )
    body = tag(
        "body",
        None,
        tag("header", None, tag("p", {"class": "brand"}, "gpipe"), tag("h1", None, title)),
        tag("main", None, *parts),
        tag("div", {"id": "tip", "role": "status", "hidden": "hidden"}),
        Html(f"<script>{_asset('script.js')}</script>"),
    )
    document = tag("html", {"lang": "en"}, tag("head", None, head), body)
    return f"<!DOCTYPE html>\n{document.source}\n"


def _one(run: Run) -> list[Child]:
    trained = run.command == "train"
    return [
        _notes(run),
        cards(run),
        _section("Training, by step", charts([run]) or _nothing("There are no metrics yet."))
        if trained
        else None,
        *_sections(run),
        _section("Again", origin(run)),
    ]


def _several(runs: Sequence[Run]) -> list[Child]:
    apart = (
        tag(
            "article",
            {"id": f"run{index}"},
            tag("h2", None, str(run.path)),
            _notes(run),
            *_sections(run),
            origin(run),
        )
        for index, run in enumerate(runs)
    )
    curves, differing = charts(runs), differences(runs)
    return [
        _section("Results", comparison(runs)),
        None if curves is None else _section("Training, by step", curves),
        _section("What differs", differing or _nothing("The configurations are the same.")),
        *apart,
    ]


def _sections(run: Run) -> list[Child]:
    return [
        _section(
            "Timeline of a step", timelines(run) or _made_by(run, "No step was recorded here.", PROFILE)
        ),
        _section("Partitions", _partitions(run)),
        _section(
            "Layers", layer_table(run) or _made_by(run, "They were not measured here.", "gpipe profile")
        ),
    ]


def _partitions(run: Run) -> Html:
    """Training does not measure activations, the larger part of memory as often as not: that must be said."""
    table = partition_table(run)
    if table is None:
        return _made_by(run, "Nothing is known of them.", PROFILE)
    if any("activation" in one.memory for one in run.partitions):
        return table
    return join([table, _made_by(run, "Activations are not counted here.", PROFILE)])


def _section(title: str, content: Html) -> Html:
    return tag("section", None, tag("h2", None, title), content)


def _nothing(told: str) -> Html:
    return tag("p", {"class": "missing"}, told)


def _made_by(run: Run, told: str, command: str) -> Html:
    """The run's own settings, where they are known as words of a command line."""
    own = next((line for line in run.next_commands.values() if line.startswith("gpipe profile ")), command)
    return tag("p", {"class": "missing"}, f"{told} This makes it: ", tag("code", None, own))


def _notes(run: Run) -> Html | None:
    if not run.notes:
        return None
    return tag("ul", {"class": "notes"}, *(tag("li", None, note) for note in run.notes))


@cache
def _asset(name: str) -> str:
    return files("gpipe_cli.report.page").joinpath(name).read_text(encoding="utf-8")


def _policy() -> str:
    return (
        f"default-src 'none'; style-src {_digest('style.css')}; script-src {_digest('script.js')}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
