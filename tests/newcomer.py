"""A newcomer's path in a fresh venv: install, train, look, profile, balance, plan, stop, go on, evaluate, export.

    python tests/newcomer.py FOLDER

Whatever an answer offers as a next command, on the terminal or on the page of a run, is taken from there and run as it
is printed. Nothing of the repository is used but what is installed from it, and FOLDER is the only place written to.
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

REPOSITORY = Path(__file__).resolve().parent.parent
WITHIN = 900
"""Seconds that one command may take."""
OFFER = re.compile(r"(?:^|[\s`>])(gpipe (?:train|eval|balance|profile|plan|report|export|ls|cp) [^`<>]*)")
STOPPED_BY_CTRL_C = 130


@final
@dataclass
class Newcomer:
    folder: Path
    done: set[str] = field(default_factory=set)

    def install(self) -> None:
        self._call([sys.executable, "-m", "venv", "venv"])
        pip = [str(self.folder / "venv/bin/pip"), "install", "--quiet"]
        self._call([*pip, "-c", str(REPOSITORY / "constraints.txt"), str(REPOSITORY)])

    def types(self, line: str) -> list[str]:
        """Run a command line; what it offers to do next."""
        self.done.add(line)
        return _offers(self._call(shlex.split(line)), line)

    def follows(self, offers: Sequence[str]) -> None:
        """Run what was offered, as it was printed, and not a second time."""
        assert offers, "no next command was printed"
        for line in offers:
            if line not in self.done:
                self.types(line)

    def interrupts(self, line: str) -> list[str]:
        """Press Ctrl-C as soon as training shows progress."""
        _told(f"$ {line}")
        # A shell that starts something in the background lets it ignore Ctrl-C, and so all that it starts in turn.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(
            shlex.split(line),
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as training:
            assert training.stderr is not None
            said = ""
            for row in training.stderr:
                said += row
                if "step " in row:
                    training.send_signal(signal.SIGINT)
                    break
            said += training.stderr.read()
        assert training.returncode == STOPPED_BY_CTRL_C, said
        return _offers(said, line)

    def offers_of_page(self, run: Path) -> list[str]:
        page = (self.folder / run / "report.html").read_text(encoding="utf-8")
        codes = re.findall(r"<code[^>]*>(gpipe [^<]+)</code>", page)
        return list(dict.fromkeys(html.unescape(code) for code in codes))

    def _call(self, words: Sequence[str]) -> str:
        _told(f"$ {shlex.join(words)}")
        began = time.monotonic()
        answer = subprocess.run(
            words, cwd=self.folder, env=self._environment(), capture_output=True, text=True, timeout=WITHIN
        )
        assert answer.returncode == 0, f"{shlex.join(words)}: {answer.stdout}{answer.stderr}"
        _told(f"  {time.monotonic() - began:.0f} s")
        return answer.stdout + answer.stderr

    def _environment(self) -> dict[str, str]:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        programs = f"{self.folder / 'venv/bin'}{os.pathsep}{outside['PATH']}"
        return {**outside, "PATH": programs, "XDG_CACHE_HOME": str(self.folder / "cache")}


def _offers(output: str, own: str) -> list[str]:
    found = (match[1].strip() for row in output.splitlines() for match in OFFER.finditer(row))
    return list(dict.fromkeys(line for line in found if line != own))


def _told(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def walk(newcomer: Newcomer) -> None:
    newcomer.install()
    newcomer.types("gpipe --help")
    newcomer.types("gpipe ls models")
    after_training = newcomer.types("gpipe train epochs=1 run_dir=first")
    newcomer.follows(after_training)
    kinds = {line.split()[1] for line in after_training}
    assert kinds >= {"train", "eval", "export"}, after_training
    newcomer.types("gpipe report first")
    newcomer.follows(newcomer.offers_of_page(Path("first")))
    newcomer.follows(["gpipe profile timeline=true"])  # unless the page had it
    newcomer.follows(newcomer.types("gpipe balance --by time model=mlp"))
    newcomer.follows(newcomer.types("gpipe plan model=mlp plan.budget=10"))
    newcomer.follows(newcomer.interrupts("gpipe train model=mlp epochs=20"))
    newcomer.follows(newcomer.types("gpipe cp recipe/digits conf/recipes/mine.yaml"))


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    place.mkdir(parents=True, exist_ok=True)
    walk(Newcomer(place))
