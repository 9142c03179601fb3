"""gpipe report: rebuild the report of a run from the files in its directory, or compare several runs in one page.

Reads files only and does without torch. It replaces an earlier report, but no other file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.arguments import Invocation
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.document import PAGE, check_replaceable, render_page
from gpipe_cli.report.page.run_facts import read_run
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.run_directory import write_text

COMPARISON = "comparison.html"


def run(invocation: Invocation) -> None:
    directories, out = _parse(invocation.words)
    check_replaceable("out", out)
    runs = [read_run(directory) for directory in directories]
    write_text(out, render_page(runs))
    notes = [f"{run.path / note}" for run in runs for note in run.problems]
    facts = {"report": str(out), "bytes": out.stat().st_size, "runs": len(runs)}
    if invocation.json:
        sys.stdout.write(f"{json.dumps({**facts, 'runs': list(map(str, directories)), 'notes': notes})}\n")
        return
    for note in notes:
        print_status(f"warning: {note}")
    print_facts("", facts)


def _parse(words: Sequence[str]) -> tuple[list[Path], Path]:
    """The run directories, and the file to write."""
    out: str | None = None
    directories: list[Path] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or Path(word).is_dir():
            directories.append(Path(word))
        elif key == "run":
            directories.append(Path(value))
        elif key != "out":
            raise ConfigError(f"unknown key '{key}'; {or_list(key, ('run', 'out'))}")
        else:
            out = value
    if not directories:
        raise ConfigError("give a run directory: gpipe report runs/train/...; give several to compare them")
    if out == "":
        raise ConfigError("out: give out=<file>")
    return directories, Path(out or (directories[0] / PAGE if len(directories) == 1 else COMPARISON))
