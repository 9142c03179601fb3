"""Published figures beside what this package predicts for the same settings.

    python -m benchmarks.published                  # all tables
    python -m benchmarks.published --rows FILE      # the table of iterations of GPT, of the rows in another CSV file

Nothing is run: operations and bytes are counted with fake tensors, a cost model makes times of them, and a simulator
makes steps of those.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import (
    published_blocks,
    published_gpipe,
    published_gpt,
    published_memory,
    published_t4,
    published_torchgpipe,
    zero_bubble,
    zero_bubble_memory,
    zero_bubble_v,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--rows", type=Path, help="a CSV file with the columns of benchmarks/data")
    options = parser.parse_args()
    console = Console(width=130)
    if options.rows is not None:
        try:
            published_gpt.show(console, options.rows, fits=False)
        except (OSError, ValueError) as error:
            parser.error(f"--rows {options.rows}: {error}")
        return
    published_torchgpipe.show(console)
    published_gpipe.show(console)
    published_gpt.show(console)
    published_t4.show(console)
    published_blocks.show(console)
    published_memory.show(console)
    zero_bubble_memory.show(console)
    zero_bubble.show()
    zero_bubble_v.show(console)


if __name__ == "__main__":
    main()
