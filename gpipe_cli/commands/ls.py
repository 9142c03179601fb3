"""gpipe ls: list the options of each group, as found in the folders. Imports neither Hydra nor torch."""

from __future__ import annotations

import json
import sys

from gpipe_cli.config.keys import Option, list_options
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.config.words import Request
from gpipe_cli.errors import ConfigError, or_list

PLURALS = {
    "models": "model",
    "transforms": "transform",
    "losses": "loss",
    "schedules": "schedule",
    "engines": "engine",
    "optimizers": "optimizer",
    "lr_schedules": "lr_schedule",
    "loggers": "logger",
    "recipe": "recipes",
}
TOPICS = (*GROUPS, "recipes")


def run(request: Request) -> None:
    topics = [topic_of(word) for word in request.words] or list(TOPICS)
    listing = {topic: [_row(option) for option in list_options(topic)] for topic in topics}
    if request.json:
        sys.stdout.write(f"{json.dumps(listing if len(listing) > 1 else listing[topics[0]], indent=2)}\n")
    elif sys.stdout.isatty():
        _print_tables(listing)
    else:
        _print_lines(listing)


def topic_of(word: str) -> str:
    topic = PLURALS.get(word, word)
    if topic not in TOPICS:
        raise ConfigError(f"nothing called '{word}' to list; {or_list(word, [*TOPICS, *PLURALS])}")
    return topic


def _row(option: Option) -> dict[str, str]:
    return {"name": option.name, **option.facts, "description": option.description}


def _print_lines(listing: dict[str, list[dict[str, str]]]) -> None:
    """One tab-separated line per option, for pipes; a topic's lines have the same columns."""
    for topic, rows in listing.items():
        columns = _columns(rows)
        for row in rows:
            cells = [*([topic] if len(listing) > 1 else []), *(row.get(column, "-") for column in columns)]
            sys.stdout.write("\t".join(cells) + "\n")


def _print_tables(listing: dict[str, list[dict[str, str]]]) -> None:
    from gpipe_cli.report.tables import print_rows  # importing rich takes time, and a pipe does not need it

    for topic, rows in listing.items():
        columns = _columns(rows)
        print_rows(topic, columns, [[row.get(column) for column in columns] for row in rows])
        sys.stdout.write("\n")


def _columns(rows: list[dict[str, str]]) -> list[str]:
    """Every key of a row, the description last."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "description")
    return [*keys, "description"] if rows else ["name"]
