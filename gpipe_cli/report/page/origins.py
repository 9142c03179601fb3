"""Where a run came from and what can be done with it: commands, configuration, environment; how runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpipe_cli.report.page.facts import Run
from gpipe_cli.report.page.html import Html, join, tag

__all__ = ["differences", "origin"]


def origin(run: Run) -> Html:
    repeat = "to repeat it, in this order" if len(run.commands) > 1 else "to repeat it"
    return join(
        [
            _commands(repeat, "\n".join(run.commands)),
            *(_commands(purpose, line) for purpose, line in run.next_commands.items()),
            _folded("configuration", tag("pre", None, run.config)) if run.config else None,
            _folded("environment", _pairs(run.environment)) if run.environment else None,
        ]
    )


def differences(runs: Sequence[Run]) -> Html | None:
    """Keys that are not the same wherever there are such; None where all agree. Each command has keys of its own."""
    by_run = [dict(_paths(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in by_run for key in one)
    differing = [
        (key, [one.get(key, "-") for one in by_run])
        for key in keys
        if key != "run_dir" and len({one[key] for one in by_run if key in one}) > 1
    ]
    if not differing:
        return None
    head = tag("tr", None, *(tag("th", None, name) for name in ("key", *(str(run.path) for run in runs))))
    body = (
        tag("tr", None, tag("td", None, key), *(tag("td", None, value) for value in values))
        for key, values in differing
    )
    table = tag("table", {"class": "differences"}, tag("thead", None, head), tag("tbody", None, *body))
    return tag("div", {"class": "scroll", "tabindex": "0"}, table)


def _commands(purpose: str, lines: str) -> Html | None:
    if not lines:
        return None
    return tag("div", {"class": "command"}, tag("p", None, purpose), tag("pre", None, lines))


def _folded(title: str, content: Html) -> Html:
    return tag("details", None, tag("summary", None, title), content)


def _pairs(facts: Mapping[str, object]) -> Html:
    rows = (
        tag("tr", None, tag("th", None, str(name)), tag("td", None, _told(value)))
        for name, value in facts.items()
    )
    return tag("table", {"class": "pairs"}, tag("tbody", None, *rows))


def _told(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _paths(config: str) -> list[tuple[str, str]]:
    """Dotted keys with their values, of YAML as gpipe writes it: a key per line, two spaces a level.

    The file is shown, never interpreted, so reading its lines is enough; items of a list belong to its key.
    """
    found: dict[str, str] = {}
    above: list[str] = []
    for line in config.splitlines():
        key, colon, value = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        if line.lstrip().startswith("- ") and above:
            path = ".".join(above)
            found[path] = f"{found.get(path, '')} {line.strip()[2:]}".strip()
        elif colon:
            above = [*above[:depth], key]
            found[".".join(above)] = value.strip()
    return list(found.items())
