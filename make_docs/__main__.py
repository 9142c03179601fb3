"""`python -m make_docs`: write every generated file of docs/, and print the names of those that changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpipe_cli.config.schema import GROUPS
from make_docs import activations, partitions, python_api, ranks, reference, run_directory, schedules

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = "concepts/pictures"
PAGES: dict[str, Callable[[], str]] = {
    "reference/keys.md": reference.keys_page,
    **{f"reference/keys/{group}.md": partial(reference.group_page, group) for group in GROUPS},
    "reference/recipes.md": reference.recipes_page,
    "reference/commands.md": reference.commands_page,
    "reference/python.md": python_api.python_page,
    f"{PICTURES}/partitions.svg": partitions.draw_partitions,
    f"{PICTURES}/skips.svg": partitions.draw_skips,
    f"{PICTURES}/ranks.svg": ranks.draw_ranks,
    f"{PICTURES}/activations.svg": activations.draw_activations,
    f"{PICTURES}/run-directory.svg": run_directory.draw_run_directory,
    **{
        f"{PICTURES}/{name}.svg": partial(schedules.draw, example)
        for name, example in schedules.EXAMPLES.items()
    },
}


def main() -> None:
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}\n")


if __name__ == "__main__":
    main()
