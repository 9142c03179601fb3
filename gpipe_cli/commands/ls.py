"""gpipe ls: the options of each group, read from the folders; imports neither Hydra nor torch."""

from __future__ import annotations

import json
import sys

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.locate import Option, options
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError

PLURALS = {
    "models": "model",
    "transforms": "transform",
    "losses": "loss",
    "schedules": "schedule",
    "engines": "engine",
    "optimizers": "optimizer",
    "lr_schedules": "lr_schedule",
    "recipe": "recipes",
}
TOPICS = (*GROUPS, "recipes")


def run(invocation: Invocation) -> None:
    topics = [_topic(word) for word in invocation.words] or list(TOPICS)
    listing = {topic: [_row(option) for option in options(topic)] for topic in topics}
    if invocation.json:
        sys.stdout.write(f"{json.dumps(listing if len(listing) > 1 else listing[topics[0]], indent=2)}\n")
    elif sys.stdout.isatty():
        _print_tables(listing)
    else:
        _print_lines(listing)


def _topic(word: str) -> str:
    topic = PLURALS.get(word, word)
    if topic not in TOPICS:
        raise ConfigError(f"nothing called '{word}' to list; {or_list(word, [*TOPICS, *PLURALS])}")
    return topic


def _row(option: Option) -> dict[str, str]:
    return {"name": option.name, **option.facts, "description": option.description}


def _print_lines(listing: dict[str, list[dict[str, str]]]) -> None:
    """One tab-separated line per option, for pipes."""
    for topic, rows in listing.items():
        for row in rows:
            cells = [*([topic] if len(listing) > 1 else []), *row.values()]
            sys.stdout.write("\t".join(cells) + "\n")


def _print_tables(listing: dict[str, list[dict[str, str]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for topic, rows in listing.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = Table(title=topic, title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, no_wrap=column != "description")
        for row in rows:
            table.add_row(*(Text(_readable(column, row.get(column, ""))) for column in columns))
        console.print(table if rows else f"{topic}: none")
        console.print()


def _readable(column: str, value: str) -> str:
    return f"{int(value) / 1e6:.2f}M" if column == "parameters" else value
