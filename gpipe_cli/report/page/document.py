"""The report page: its sections in order, and for a missing one the command that makes it.

One file. The content security policy allows the style and the script below by their digests and nothing else: the page
makes no request, and no text in it can become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from gpipe_cli.report.colors import color_style
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import metric_charts
from gpipe_cli.report.page.check_section import check_table, verdict_counts
from gpipe_cli.report.page.comparison import Comparison
from gpipe_cli.report.page.cost_tables import layer_table, partition_table
from gpipe_cli.report.page.curves import MetricCurve
from gpipe_cli.report.page.html import Child, Html, join, tag
from gpipe_cli.report.page.run_facts import RunFacts
from gpipe_cli.report.page.run_files import as_number
from gpipe_cli.report.page.step_timelines import step_timelines

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="gpipe">'
"""How to tell a page of ours from another file of that name."""
PROFILE = "gpipe profile timeline=true"
TITLES = {
    "loss": "loss",
    "top1": "top-1",
    "top5": "top-5",
    "steps": "steps",
    "samples_per_second": "samples per second",
    "seconds": "time",
    "predicted_step_ms": "predicted step, ms",
    "predicted_bubble": "predicted bubble",
    "predicted_speedup": "predicted speed-up",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "forward_flops": "forward FLOPs",
    "backward_flops": "backward FLOPs",
    "saved_bytes": "saved for backward",
    "parameter_bytes": "parameters",
}
"""Keys of a summary and their titles, in this order; other metrics follow under their own names."""
FEW_RUNS = 3
"""A comparison of more shows the details of a run on request only."""
HIDDEN = ("epochs", "micro_batch", "parameters")


def render_page(runs: Sequence[RunFacts]) -> str:
    """The report of one run, or of several to compare."""
    title = str(runs[0].path) if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    content = _run_content(runs[0]) if len(runs) == 1 else _comparison_content(runs)
    policy = (
        f"default-src 'none'; style-src {_digest(_style())}; script-src {_digest(_asset('script.js'))}; "
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
        Html(f"<style>{_style()}</style>"),
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
        metrics = _section("Metrics by step", metric_charts(run) or _missing("No metrics were recorded yet."))
    return [
        _problems(run),
        summary_cards(run),
        metrics,
        *_details(run),
        _section(
            "Repeat this check" if run.command == "check" else "Repeat or continue this run",
            reproduction(run),
        ),
    ]


def _comparison_content(runs: Sequence[RunFacts]) -> list[Child]:
    comparison = Comparison.of(runs)
    charts = comparison.charts()
    articles = (
        tag(
            "details",
            {"class": "run", **({"open": "open"} if len(runs) <= FEW_RUNS else {})},
            tag("summary", None, tag("h2", None, label)),
            tag(
                "article",
                {"id": f"run{index}"},
                tag("p", {"class": "path"}, str(run.path)),
                _problems(run),
                *_details(run),
                reproduction(run),
            ),
        )
        for index, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True))
    )
    return [
        tag("p", {"class": "path"}, f"in {comparison.folder}"),
        _section("Results", comparison.results([headline(run) for run in comparison.runs])),
        None if charts is None else _section("Metrics by step", charts),
        _section(
            "Settings that differ", comparison.settings() or _missing("All runs have the same settings.")
        ),
        _section("Each run", join(articles)),
    ]


def _details(run: RunFacts) -> list[Child]:
    """The sections that a run and a comparison have in common."""
    if run.command == "check":
        return [_checks(run)]
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
        _checks(run) if run.checks else None,
    ]


def _checks(run: RunFacts) -> Html:
    return _section(
        "Check of the machine", check_table(run.checks) if run.checks else _missing("No check was recorded.")
    )


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


def _style() -> str:
    # The colors first: the rest may make an exception of one.
    return color_style() + _asset("style.css")


def _digest(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def headline(run: RunFacts) -> dict[str, str]:
    """Title and value of the results of a run."""
    numbers = {name: value for name, value in run.summary.items() if as_number(value) is not None}
    results: dict[str, str] = {}
    if run.measured is not None:
        results["recorded step, ms"] = f"{run.measured.milliseconds:.1f}"
        results["recorded bubble"] = format_value("bubble", run.measured.bubble)
    known = {TITLES[name]: format_value(name, numbers[name]) for name in TITLES if name in numbers}
    results |= known or _latest_metrics(run.curves)
    results |= {verdict: str(count) for verdict, count in verdict_counts(run.checks).items()}
    for curve in run.curves:
        if (curve.metric, curve.split) == ("loss", "eval"):
            step, loss = curve.lowest
            results["best loss"] = f"{format_value('loss', loss)} at step {step:.0f}"
    for name, value in numbers.items():
        if name not in TITLES and name not in HIDDEN:
            results[name.replace("_", " ")] = format_value(name, value)
    return results


def summary_cards(run: RunFacts) -> Html:
    return tag(
        "dl",
        {"class": "cards"},
        *(
            tag("div", {"class": "card"}, tag("dt", None, title), tag("dd", None, value))
            for title, value in headline(run).items()
        ),
    )


def _latest_metrics(curves: Sequence[MetricCurve]) -> dict[str, str]:
    """For a run that has not finished: what it measured last."""
    losses = {
        f"loss ({curve.split})": format_value("loss", curve.points[-1].mean)
        for curve in curves
        if curve.metric == "loss"
    }
    steps = [curve.points[-1].last for curve in curves]
    return {**losses, "steps": f"{max(steps):.0f}, not finished"} if steps else {}


def reproduction(run: RunFacts) -> Html:
    """The commands that repeat and continue a run, its configuration and its environment."""
    noun = "check" if run.command == "check" else "run"
    purpose = "Repeat the run, in this order" if len(run.commands) > 1 else f"Repeat the {noun}"
    commands = {purpose: "\n".join(run.commands), **run.next_commands}
    return join(
        [
            *(
                tag("div", {"class": "command"}, tag("p", None, purpose), tag("pre", None, lines))
                for purpose, lines in commands.items()
                if lines
            ),
            _collapsed("Configuration", tag("pre", None, run.config)) if run.config else None,
            _collapsed("Environment", _environment_table(run.environment)) if run.environment else None,
        ]
    )


def _collapsed(title: str, content: Html) -> Html:
    return tag("details", None, tag("summary", None, title), content)


def _environment_table(facts: Mapping[str, object]) -> Html:
    rows = (
        tag(
            "tr",
            None,
            tag("th", None, str(name)),
            tag("td", None, ", ".join(map(str, value)) if isinstance(value, list) else str(value)),
        )
        for name, value in facts.items()
    )
    return tag("table", {"class": "pairs"}, tag("tbody", None, *rows))
