"""The first session of a new user in a fresh venv: install, train, report, profile, balance, plan, stop, resume.

Every next command that gpipe offers, on the terminal or in the report of a run, is run exactly as it is printed. The
session uses nothing of the repository except what it installs from it, and writes to a single folder.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND_TIMEOUT = 900
OFFERED = re.compile(r"(?:^|[\s`>])(gpipe (?:train|eval|balance|profile|plan|report|export|ls|cp) [^`<>]*)")
STOPPED_BY_CTRL_C = 130


@final
@dataclass
class UserSession:
    folder: Path
    already_run: set[str] = field(default_factory=set)

    def install(self) -> None:
        self._call([sys.executable, "-m", "venv", "venv"])
        pip = [str(self.folder / "venv/bin/pip"), "install", "--quiet"]
        self._call([*pip, "-c", str(REPOSITORY / "constraints.txt"), str(REPOSITORY)])

    def run(self, line: str) -> list[str]:
        """Run a command line and return the next commands that it offers."""
        self.already_run.add(line)
        return _offered(self._call(shlex.split(line)), line)

    def run_offered(self, lines: Sequence[str]) -> None:
        """Run the offered commands as they were printed, each of them once in a session."""
        assert lines, "no next command was printed"
        for line in lines:
            if line not in self.already_run:
                self.run(line)

    def interrupt(self, line: str) -> list[str]:
        """Press Ctrl-C as soon as training shows progress."""
        _print(f"$ {line}")
        with subprocess.Popen(
            shlex.split(line),
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as training:
            assert training.stderr is not None
            output = ""
            for row in training.stderr:
                output += row
                if "step " in row:
                    training.send_signal(signal.SIGINT)
                    break
            output += training.stderr.read()
        assert training.returncode == STOPPED_BY_CTRL_C, output
        return _offered(output, line)

    def commands_in_report(self, run: Path) -> list[str]:
        page = (self.folder / run / "report.html").read_text(encoding="utf-8")
        codes = re.findall(r"<code[^>]*>(gpipe [^<]+)</code>", page)
        return list(dict.fromkeys(html.unescape(code) for code in codes))

    def _call(self, words: Sequence[str]) -> str:
        _print(f"$ {shlex.join(words)}")
        began = time.monotonic()
        answer = subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
        )
        assert answer.returncode == 0, f"{shlex.join(words)}: {answer.stdout}{answer.stderr}"
        _print(f"  {time.monotonic() - began:.0f} s")
        return answer.stdout + answer.stderr

    def _environment(self) -> dict[str, str]:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        programs = f"{self.folder / 'venv/bin'}{os.pathsep}{outside['PATH']}"
        return {**outside, "PATH": programs, "XDG_CACHE_HOME": str(self.folder / "cache")}


def _offered(output: str, own: str) -> list[str]:
    commands = (match[1].strip() for row in output.splitlines() for match in OFFERED.finditer(row))
    return list(dict.fromkeys(line for line in commands if line != own))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_new_user_gets_from_installing_to_exported_weights_by_the_commands_that_gpipe_prints(
    tmp_path: Path,
) -> None:
    session = UserSession(tmp_path)
    session.install()
    session.run("gpipe --help")
    session.run("gpipe ls models")
    after_training = session.run("gpipe train epochs=1 run_dir=first")
    session.run_offered(after_training)
    kinds = {line.split()[1] for line in after_training}
    assert kinds >= {"train", "eval", "export"}, after_training
    session.run("gpipe report first")
    session.run_offered(session.commands_in_report(Path("first")))
    session.run_offered(["gpipe profile timeline=true"])  # unless the report offered it
    session.run_offered(session.run("gpipe balance --by time model=mlp"))
    session.run_offered(session.run("gpipe plan model=mlp plan.budget=10"))
    session.run_offered(session.interrupt("gpipe train model=mlp epochs=20"))
    session.run_offered(session.run("gpipe cp recipe/digits conf/recipes/mine.yaml"))
