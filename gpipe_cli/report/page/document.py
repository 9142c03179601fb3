"""The report page: its sections in order, and for a missing one the command that makes it.

One file. The content security policy allows the style and the script below by their digests and nothing else: the page
makes no request, and no text in it can become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from gpipe_cli.report.page.charts import metric_charts
from gpipe_cli.report.page.cost_tables import layer_table, partition_table
from gpipe_cli.report.page.html import Child, Html, join, tag
from gpipe_cli.report.page.overview import comparison_table, config_differences, reproduction, summary_cards
from gpipe_cli.report.page.run_facts import RunFacts
from gpipe_cli.report.page.timelines import step_timelines

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="gpipe">'
"""How to tell a page of ours from another file of that name."""
PROFILE = "gpipe profile timeline=true"


def render_page(runs: Sequence[RunFacts]) -> str:
    """The report of one run, or of several to compare."""
    title = str(runs[0].path) if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    content = _run_content(runs[0]) if len(runs) == 1 else _comparison_content(runs)
    policy = (
        f"default-src 'none'; style-src {_digest('style.css')}; script-src {_digest('script.js')}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        Html(GENERATOR),
        tag("title", None, f"{title} · gpipe"),
        Html(f"<style>{_asset('style.css')}</style>"),
    )
    body = tag(
        "body",
        None,
        tag("header", None, tag("p", {"class": "brand"}, "gpipe"), tag("h1", None, title)),
        tag("main", None, *content),
        tag("div", {"id": "tip", "role": "status", "hidden": "hidden"}),
        Html(f"<script>{_asset('script.js')}</script>"),
    )
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, body).source}\n"


def _run_content(run: RunFacts) -> list[Child]:
    metrics = None
    if run.command == "train":
        metrics = _section(
            "Metrics by step", metric_charts([run]) or _missing("No metrics were recorded yet.")
        )
    return [
        _problems(run),
        summary_cards(run),
        metrics,
        *_details(run),
        _section("Repeat or continue this run", reproduction(run)),
    ]


def _comparison_content(runs: Sequence[RunFacts]) -> list[Child]:
    charts, differences = metric_charts(runs), config_differences(runs)
    articles = (
        tag(
            "article",
            {"id": f"run{index}"},
            tag("h2", None, str(run.path)),
            _problems(run),
            *_details(run),
            reproduction(run),
        )
        for index, run in enumerate(runs)
    )
    return [
        _section("Results", comparison_table(runs)),
        None if charts is None else _section("Metrics by step", charts),
        _section("Settings that differ", differences or _missing("All runs have the same settings.")),
        *articles,
    ]


def _details(run: RunFacts) -> list[Child]:
    """The sections that a run and a comparison have in common."""
    timelines = step_timelines(run) or _missing_command(
        run, "This run recorded no step. To record one, run", PROFILE
    )
    partitions = partition_table(run)
    if partitions is None:
        partitions = _missing_command(
            run, "This run did not record its partitions. To see them, run", PROFILE
        )
    elif not any("activation" in partition.memory for partition in run.partitions):
        # Training does not measure activations, which are often the larger part of memory: say so.
        hint = _missing_command(
            run, "The memory above does not include activations. To measure them, run", PROFILE
        )
        partitions = join([partitions, hint])
    layers = layer_table(run) or _missing_command(
        run, "This run did not measure its layers. To measure them, run", "gpipe profile"
    )
    return [
        _section("Timeline of a step", timelines),
        _section("Partitions", partitions),
        _section("Layers", layers),
    ]


def _section(title: str, content: Html) -> Html:
    return tag("section", None, tag("h2", None, title), content)


def _missing(text: str) -> Html:
    return tag("p", {"class": "missing"}, text)


def _missing_command(run: RunFacts, text: str, command: str) -> Html:
    """What is missing, and a command that measures it; with the run's own settings, if they are known."""
    own = next((line for line in run.next_commands.values() if line.startswith("gpipe profile ")), command)
    return tag("p", {"class": "missing"}, f"{text} ", tag("code", None, own))


def _problems(run: RunFacts) -> Html | None:
    if not run.problems:
        return None
    return tag("ul", {"class": "notes"}, *(tag("li", None, problem) for problem in run.problems))


@cache
def _asset(name: str) -> str:
    return files("gpipe_cli.report.page").joinpath(name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    digest = hashlib.sha256(_asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
