"""The report page: its sections in order; what a run did not record has no section.

One file. The content security policy allows the style and the script below by their digests and nothing else: the page
makes no request, and no text in it can become code.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from gpipe_cli.errors import ConfigError
from gpipe_cli.report.colors import color_style
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import metric_charts
from gpipe_cli.report.page.comparison import Comparison
from gpipe_cli.report.page.costs import layer_table, partition_table, step_timelines
from gpipe_cli.report.page.curves import MetricCurve
from gpipe_cli.report.page.html import Child, Html, join, tag
from gpipe_cli.report.page.predictions import confusion, sample_gallery, text_sample
from gpipe_cli.report.page.run_facts import RunFacts, check_table, verdict_counts
from gpipe_cli.report.page.run_files import as_number, watched_metric
from gpipe_cli.safe_files import UnsafeFile, open_regular

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="gpipe">'
"""How to tell a page of ours from another file of that name."""
RELOAD_SECONDS = 15
"""How often the page of a running run reloads itself."""
TITLES = {
    "loss": "eval loss",
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
    "parameters": "parameters",
    "parameter_bytes": "memory of parameters",
}
"""Keys of a summary and their titles, in this order; other metrics follow under their own names."""
FEW_RUNS = 3
"""A comparison of more shows the details of a run on request only."""
HIDDEN = ("epochs", "micro_batch")


def render_page(runs: Sequence[RunFacts]) -> str:
    """The report of one run, or of several to compare."""
    title = str(runs[0].path) if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    content = _run_content(runs[0]) if len(runs) == 1 else _comparison_content(runs)
    reloads = len(runs) == 1 and runs[0].state is not None and runs[0].state.name == "running"
    return whole_page(title, content, reloads=reloads)


def whole_page(title: str, content: Iterable[Child], *, reloads: bool = False) -> str:
    policy = (
        f"default-src 'none'; style-src {_digest(_style())}; script-src {_digest(_asset('script.js'))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"http-equiv": "refresh", "content": str(RELOAD_SECONDS)}) if reloads else None,
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
    return [
        _problems(run),
        _state(run),
        cards(headline(run)),
        section("Metrics by step", metric_charts(run)),
        *_results(run),
        *_details(run),
        section(
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
                _state(run),
                *_results(run),
                *_details(run),
                reproduction(run),
            ),
        )
        for index, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True))
    )
    same = tag("p", None, "All runs have the same settings.")
    return [
        tag("p", {"class": "path"}, f"in {comparison.folder}"),
        section("Results", comparison.results([headline(run) for run in comparison.runs])),
        section("Metrics by step", charts),
        section("Settings that differ", comparison.settings() or same),
        section("Each run", join(articles)),
    ]


def _results(run: RunFacts) -> list[Child]:
    """What the trained model does, and what it was made from."""
    predictions = run.predictions
    at = "" if predictions is None else f" after step {predictions.step}"
    weights = [tag("p", None, tag("strong", None, f"{name}: "), text) for name, text in run.weights.items()]
    return [
        section("Weights", join(weights) if weights else None),
        section(f"Confusion matrix{at}", None if predictions is None else confusion(predictions)),
        section(f"Held-out samples{at}", None if predictions is None else sample_gallery(predictions)),
        section("Generated text", None if run.sample is None else text_sample(run.sample)),
    ]


def _details(run: RunFacts) -> list[Child]:
    """How the run used the machine."""
    which = "a step" if run.recorded_step is None else f"step {run.recorded_step}"
    return [
        section(f"Timeline of {which}", step_timelines(run)),
        section("Partitions", partition_table(run)),
        section("Layers", layer_table(run)),
        section("Check of the machine", check_table(run.checks) if run.checks else None),
    ]


def section(title: str, content: Html | None) -> Html | None:
    """None without content: the page has no empty boxes."""
    return None if content is None else tag("section", None, tag("h2", None, title), content)


def _state(run: RunFacts) -> Html | None:
    """How a training run ended, unless it finished."""
    if run.state is None or run.state.name == "finished":
        return None
    if run.state.name == "running":
        made = datetime.now(UTC).replace(microsecond=0)
        since = tag("time", {"datetime": made.isoformat()}, f"at {made:%H:%M:%S} UTC")
        return tag(
            "p",
            {"class": "state"},
            "This run is training. gpipe wrote this page ",
            since,
            "; it reloads itself.",
        )
    texts = {
        "stopped": "This run was stopped and can be resumed",
        "failed": "An error ended this run",
        "dead": "The process of this run ended without a message: it was killed, or the machine went down",
    }
    reason = f": {run.state.reason}" if run.state.reason else "."
    resume = next((line for line in run.next_commands.values() if line.startswith("gpipe train ")), "")
    command = tag("pre", None, resume) if resume else None
    return tag("div", {"class": "state"}, tag("p", None, f"{texts[run.state.name]}{reason}"), command)


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
    results = {TITLES[name]: format_value(name, numbers[name]) for name in TITLES if name in numbers}
    results = results or _latest_metrics(run.curves)
    results |= {verdict: str(count) for verdict, count in verdict_counts(run.checks).items()}
    for curve in run.curves:
        if curve.split == "eval" and curve.metric in ("loss", watched_metric(run.config)):
            step, value = curve.best()
            results[f"best eval {curve.metric}"] = f"{format_value(curve.metric, value)} at step {step:.0f}"
    for name, value in numbers.items():
        if name not in TITLES and name not in HIDDEN:
            results[name.replace("_", " ")] = format_value(name, value)
    if run.measured is not None:
        results["recorded step, ms"] = f"{run.measured.milliseconds:.1f}"
        results["recorded bubble"] = format_value("bubble", run.measured.bubble)
    return results


def cards(figures: Mapping[str, str]) -> Html:
    """By title."""
    pairs = ((tag("dt", None, title), tag("dd", None, value)) for title, value in figures.items())
    return tag("dl", {"class": "cards"}, *(tag("div", {"class": "card"}, *pair) for pair in pairs))


def _latest_metrics(curves: Sequence[MetricCurve]) -> dict[str, str]:
    """For a run that has not finished: what it measured last."""
    losses = {
        f"{curve.split} loss": format_value("loss", curve.points[-1].mean)
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


def check_replaceable(key: str, out: Path) -> None:
    try:
        with os.fdopen(open_regular(out, base=out.parent), encoding="utf-8", errors="replace") as file:
            is_report = GENERATOR in file.read(4096)
    except FileNotFoundError:
        return
    except UnsafeFile as error:
        raise ConfigError(f"{key}={out}: {error}; give another name, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{key}={out}: cannot be written: {error}") from error
    if not is_report:
        raise ConfigError(f"{key}={out}: exists and is not a report; give another name, or remove it")
