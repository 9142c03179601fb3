"""gpipe report: the page of a run, built anew from the files in its directory, or one page that compares several.

Reads files only and does without torch. A page of ours is replaced, any other file is left alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.arguments import Invocation
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.failure import describe
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.document import GENERATOR, PAGE, render_page
from gpipe_cli.report.page.facts import RunFacts
from gpipe_cli.report.page.reader import read_run
from gpipe_cli.report.tables import print_facts
from gpipe_cli.safe_files import UnsafeFile, open_regular
from gpipe_cli.training.run_directory import write_text

__all__ = ["leave_page", "run"]

COMPARISON = "comparison.html"


def run(invocation: Invocation) -> None:
    directories, out = _given(invocation.words)
    _check_replaceable(out)
    runs = [read_run(one) for one in directories]
    write_text(out, render_page(runs))
    notes = [f"{one.path / note}" for one in runs for note in one.problems]
    facts = {"report": str(out), "bytes": out.stat().st_size, "runs": len(runs)}
    if invocation.json:
        sys.stdout.write(f"{json.dumps({**facts, 'runs': list(map(str, directories)), 'notes': notes})}\n")
        return
    for note in notes:
        print_status(f"warning: {note}")
    print_facts("", facts)


def leave_page(directory: Path) -> RunFacts | None:
    """The page of a run that has just ended, in its directory; None and a warning where that is not possible."""
    try:
        found = read_run(directory)
        write_text(directory / PAGE, render_page([found]))
    except Exception as error:  # noqa: BLE001 - what was trained is saved: no picture of it may end it in an error
        print_status(f"warning: {PAGE} is left out: {describe(error)}")
        return None
    return found


def _given(words: Sequence[str]) -> tuple[list[Path], Path]:
    """The directories, and the file to write."""
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
        raise ConfigError("say which run: gpipe report runs/train/..., or several to compare them")
    if out == "":
        raise ConfigError("out: give out=<file>")
    return directories, Path(out or (directories[0] / PAGE if len(directories) == 1 else COMPARISON))


def _check_replaceable(out: Path) -> None:
    try:
        with os.fdopen(open_regular(out, base=out.parent), encoding="utf-8", errors="replace") as file:
            ours = GENERATOR in file.read(4096)
    except FileNotFoundError:
        return
    except UnsafeFile as error:
        raise ConfigError(f"out={out}: {error}; give another name, or remove it") from error
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written: {error}") from error
    if not ours:
        raise ConfigError(f"out={out}: exists and is no report; give another name, or remove it")
