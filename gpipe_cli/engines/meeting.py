"""Where the ranks of one machine meet and what they leave there: a folder of their own, readable by nobody else.

Files instead of sockets: nothing listens, no port can be taken. Decides the names and forms of these files; knows
nothing of what a rank does. All that is read back is JSON and numbers.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import INTERRUPTED, Stopped

NOT_IN_A_STEP = 0.0


@final
@dataclass(frozen=True)
class LastWord:
    """What a rank says of its own end, just before it."""

    exit_code: int
    text: str = ""
    blames_a_peer: bool = False
    """Whether it ended because another rank did, or did not answer."""
    when: float = 0.0
    """By the monotonic clock, which all processes of a machine share."""
    summary: Mapping[str, Any] | None = None
    """What the command found; of rank 0."""

    @property
    def in_order(self) -> bool:
        """Whether it came to its end, or stopped where it was asked to."""
        return self.exit_code in (0, Stopped.exit_code, INTERRUPTED)


@final
@dataclass(frozen=True)
class Meeting:
    folder: Path

    @property
    def store(self) -> str:
        """For torch, as the `init_method` of a process group."""
        return f"file://{self.folder / 'store'}"

    @property
    def task(self) -> Path:
        """What the ranks are to do, as their launcher wrote it."""
        return self.folder / "task.json"

    @property
    def beats(self) -> Path:
        return self.folder / "beats"

    def output_of(self, rank: int) -> Path:
        """What a rank that is not to speak writes until it has a log."""
        return self.folder / f"rank-{rank}.txt"

    def say_last(self, rank: int, word: LastWord) -> None:
        path = self._word(rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(word)), encoding="utf-8")
        part.rename(path)  # whole or not at all: the reader may come at any moment

    def last_word(self, rank: int) -> LastWord | None:
        """None of a rank that was not given the time to say it."""
        try:
            return LastWord(**json.loads(self._word(rank).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def tell_run(self, run: Path) -> None:
        """Which directory the run has got, so that another attempt goes on in it."""
        (self.folder / "run").write_text(str(run), encoding="utf-8")

    def run(self) -> Path | None:
        try:
            return Path((self.folder / "run").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def _word(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


@final
class Beats:
    """Since when each rank has been in its step, in memory that all of them share."""

    def __init__(self, path: Path, ranks: int) -> None:
        """Made by the first that comes; who comes later finds it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, 8 * ranks)
            self._since = memoryview(mmap.mmap(descriptor, 8 * ranks)).cast("d")
        finally:
            os.close(descriptor)

    def begin(self, rank: int) -> None:
        self._since[rank] = time.monotonic()

    def end(self, rank: int) -> None:
        self._since[rank] = NOT_IN_A_STEP

    def since(self) -> list[float]:
        """By the monotonic clock; NOT_IN_A_STEP of those that are in none."""
        return [float(one) for one in self._since]
