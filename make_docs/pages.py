"""Which files of docs/ are generated, and by which function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from make_docs import commands, keys, schedules, sequences

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = "concepts/pictures"
PAGES: dict[str, Callable[[], str]] = {
    "reference/keys.md": keys.page,
    "reference/commands.md": commands.page,
    f"{PICTURES}/partitions.svg": sequences.partitions,
    f"{PICTURES}/skips.svg": sequences.skips,
    **{
        f"{PICTURES}/{name}.svg": partial(schedules.picture, schedule)
        for name, schedule in schedules.PICTURES.items()
    },
}
