"""Read run directories: what a run is, its state, its rows of metrics and its best evaluation, and the list of runs.

Nothing in a file is trusted or run: files are bounded in size, a missing one is fine, and one that is damaged, too
large or not a regular file becomes a problem that the reader lists. The state of a training run follows from who holds
its lock and what its last process left:

    running   a process holds the lock
    finished  it wrote its result
    stopped   it was asked to stop; it can be resumed
    failed    an error ended it
    crashed   none of these: its process was killed, or the machine lost power

A run of several ranks has one directory, which rank 0 locks, so it has one state. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import UnsafeFile, open_regular, parse_json, read_regular
from gpipe_cli.values import lower_is_better

CONFIG, OVERRIDES, METRICS = "config.yaml", "overrides.yaml", "metrics.jsonl"
SWEEP = "sweep.json"
"""In the directory of a sweep, which has a folder for each run."""
LOCK_NAME = "run.lock"
OUTCOME = "outcome.json"
"""Why a run ended without a result; a resumed run removes it."""
RESULTS = ("summary.json", "profile.json")
RUN_FILES = (CONFIG, "launch.json", METRICS, LOCK_NAME, OUTCOME, *RESULTS, "check.json")
"""A directory with none of these is not a run."""
DAMAGED = "damaged"
"""The state of a run directory whose files cannot be read."""
MAX_OUTCOME_BYTES = 2**20
MAX_FILE_BYTES = 64 * 2**20
"""A page could not show more."""
MAX_LINES_BYTES = 4 * 2**30
"""Ten million rows of metrics, which take a minute or two to read."""
MAX_LINE_BYTES = 2**20
"""A row of metrics has a few hundred."""
MAX_NUMBER = 1e100
"""Sums and differences of such numbers do not overflow."""
MAX_STEPS = 10**12
MAX_ENTRIES = 200_000
"""Files and folders below one directory; a walk ends there."""
MAX_DEPTH = 8
LAST_ROWS = 2
"""At the end of metrics.jsonl: a row of training, and perhaps the evaluation after it."""
FLOCK = struct.Struct("hhqqi")
"""C's struct flock on Linux: type, whence, start, length, process."""

own_locks: set[tuple[int, int]] = set()
"""Device and inode of each lock file that this process has locked: closing a second descriptor of such a file would
release the lock, so it must not be opened again."""


def is_run(directory: Path) -> bool:
    """Whether a directory is a run, or what is left of one."""
    return any(os.path.lexists(directory / name) for name in RUN_FILES)


def has_settings(directory: Path) -> bool:
    """Whether a directory is a run that can be resumed or copied: it has a config.yaml."""
    return (directory / CONFIG).exists()


@final
@dataclass(frozen=True)
class RunState:
    name: Literal["running", "finished", "stopped", "failed", "crashed"]
    reason: str = ""
    """Why it stopped or failed, in one line."""


def run_state(directory: Path) -> RunState | None:
    """The state of the run in a directory; None if there is no run in it. RunError if its files cannot be trusted."""
    try:
        if not is_run(directory):
            return None
        own = _is_own_lock(directory / LOCK_NAME)
        if not own and _is_locked(directory):
            return RunState("running")
        if any((directory / name).is_file() for name in RESULTS):
            return RunState("finished")
        outcome = _read_outcome(directory)
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: its state cannot be read: {error}") from error
    # A process that still holds the lock when it has written how the run ended is about to release it.
    return outcome or RunState("running" if own else "crashed")


def _is_own_lock(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) in own_locks


def _is_locked(directory: Path) -> bool:
    """Whether another process holds the lock: asks the system without taking the lock, so no run has to wait."""
    try:
        descriptor = open_regular(directory / LOCK_NAME, base=directory)
    except FileNotFoundError:
        return False
    try:
        question = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    finally:
        os.close(descriptor)
    return bool(answer[0] != fcntl.F_UNLCK)


def _read_outcome(directory: Path) -> RunState | None:
    try:
        content: Any = parse_json(read_regular(directory / OUTCOME, MAX_OUTCOME_BYTES, base=directory))
    except FileNotFoundError:
        return None
    match content:
        case {"state": "stopped" | "failed" as name, "reason": str(reason)}:
            return RunState(name, reason)
    raise ValueError(f"{OUTCOME} is damaged")


@final
@dataclass(frozen=True)
class Evaluation:
    """One evaluation, by the metric that decides which one is best."""

    value: float
    step: int | None
    epoch: int | None


@final
class RunReader:
    """The files of a run directory that can be read; `problems` lists those that cannot."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        path = self.directory / name
        try:
            return read_regular(path, MAX_FILE_BYTES, base=self.directory).decode()
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            self.problems.append(f"{name}: not UTF-8 text; the page leaves it out")
        except OSError as error:
            self.problems.append(f"{name}: cannot be read: {error.strerror or error}")
        return ""

    def json(self, name: str) -> Mapping[str, Any]:
        """The mapping in a JSON file; empty if there is none."""
        content = self.text(name)
        if not content:
            return {}
        try:
            parsed = parse_json(content)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            self.problems.append(f"{name}: damaged; the page leaves it out")
            return {}
        return parsed

    def rows(self, *, sparse: bool = False) -> Iterator[Mapping[str, Any]]:
        """The rows of metrics.jsonl, line by line, so that the file may be larger than memory.

        sparse: only evaluations and the last rows; the others are not parsed, since a run may have a million of them.
        """
        damaged = 0
        try:
            for line in self._lines(METRICS, sparse=sparse):
                row = _parse_row(line)
                if row is None:
                    damaged += 1
                else:
                    yield row
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"{METRICS}: cannot be read: {error.strerror or error}")
        if damaged:
            self.problems.append(f"{METRICS}: {damaged} damaged lines; the page leaves them out")

    def _lines(self, name: str, *, sparse: bool) -> Iterator[bytes]:
        waiting: deque[bytes] = deque()
        with os.fdopen(open_regular(self.directory / name, base=self.directory), "rb") as file:
            left = os.fstat(file.fileno()).st_size  # what a run appends meanwhile is left out
            if left > MAX_LINES_BYTES:
                raise UnsafeFile(f"has {left:,} bytes; gpipe reads at most {MAX_LINES_BYTES:,}")
            while left > 0 and (line := file.readline(MAX_LINE_BYTES)):
                left -= len(line)
                if left <= 0 and not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    break  # a run that is training, or was killed, may leave half a line at the end
                waiting.append(line)
                if len(waiting) > LAST_ROWS and (b'"eval"' in (before := waiting.popleft()) or not sparse):
                    yield before
        yield from waiting

    @cached_property
    def config(self) -> Mapping[str, str]:
        """The settings by their dotted keys."""
        return flat_config(self.text(CONFIG))

    @property
    def monitor(self) -> str:
        """The metric that decides which evaluation is best."""
        return monitor_of(self.config)

    def evaluations(self, rows: Iterable[Mapping[str, Any]] | None = None) -> list[Evaluation]:
        """Every evaluation with a value of `monitor`, over all launches; rows: the run's, if already read."""
        return [
            Evaluation(value, as_int(row.get("step"), MAX_STEPS), as_int(row.get("epoch"), MAX_STEPS))
            for row in (self.rows(sparse=True) if rows is None else rows)
            if row.get("split") == "eval" and (value := as_number(row.get(self.monitor))) is not None
        ]

    def best(self, evaluations: list[Evaluation] | None = None) -> Evaluation | None:
        """The first of those that are equally good, as for snapshots; evaluations: the run's, if they were read."""
        better = min if lower_is_better(self.monitor) else max
        return better(
            self.evaluations() if evaluations is None else evaluations,
            key=lambda evaluation: evaluation.value,
            default=None,
        )

    def state(self) -> RunState | None:
        return run_state(self.directory)


def flat_config(config: str) -> dict[str, str]:
    """Dotted keys and their values of YAML as gpipe writes it: one key per line, two spaces per level.

    Only shown and compared, so its lines are enough; parsing the YAML of hundreds of runs would take seconds. The
    items of a list belong to its key.
    """
    values: dict[str, str] = {}
    parents: list[str] = []
    for line in config.splitlines():
        key, colon, value = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        if line.lstrip().startswith("- ") and parents:
            path = ".".join(parents)
            values[path] = f"{values.get(path, '')} {line.strip()[2:]}".strip()
        elif colon:
            parents = [*parents[:depth], key]
            values[".".join(parents)] = value.strip()
    return values


def monitor_of(config: Mapping[str, str]) -> str:
    """The metric that decides which evaluation of a run is best; config: as `flat_config` returns it."""
    monitor = config.get("snapshot.monitor", "loss")
    return monitor if monitor.isidentifier() and monitor != "null" else "loss"


def _parse_row(line: bytes) -> Mapping[str, Any] | None:
    """One of perhaps millions of lines: whoever uses a number checks its size."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def as_number(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    if type(value) is float:  # nearly all numbers of a long metrics.jsonl
        return value if -MAX_NUMBER <= value <= MAX_NUMBER else None
    if type(value) is not int:
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if abs(number) <= MAX_NUMBER else None


def as_int(value: Any, most: int) -> int | None:
    """An integer from 0 to `most`, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings among the items of a list."""
    return [item for item in as_list(value) if isinstance(item, dict)]


@final
@dataclass(frozen=True)
class DiskUse:
    changed: float
    """When a file changed last, in seconds since 1970."""
    bytes: int
    """Of all files."""

    @staticmethod
    def of(directory: Path) -> DiskUse:
        changed, size, left = 0.0, 0, MAX_ENTRIES
        waiting = [str(directory)]
        while waiting and left > 0:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        left -= 1
                        status = entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        else:
                            size += status.st_size
                            changed = max(changed, status.st_mtime)
            except OSError:  # removed meanwhile, or not readable: what is left still has a size
                continue
        return DiskUse(changed, size)


@final
@dataclass(frozen=True)
class RunRow:
    run: str
    state: str
    step: int | None = None
    steps: int | None = None
    """How many steps the whole run has, if known."""
    metric: str = "loss"
    """The metric that decides the best snapshot."""
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    train_loss: float | None = None
    """The last one, which is all there is before the first evaluation."""
    changed: float = 0.0
    """When a file of the run changed last, in seconds since 1970."""
    bytes: int = 0
    differs: str = ""
    """The settings that the other runs of its sweep have not."""
    note: str = ""
    """Why it stopped or failed, or what is wrong with its files."""


def find_runs(root: Path) -> tuple[list[Path], bool]:
    """The training runs at or below a folder, and whether the walk has seen all of it; follows no symbolic links.

    It begins with what is near, and enters neither runs nor hidden folders nor environments of Python.
    """
    runs, left = [], MAX_ENTRIES
    waiting = deque([(root, 0)])
    while waiting and left > 0:
        folder, depth = waiting.popleft()
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except OSError as error:
            if folder == root:
                raise RunError(f"{root}: cannot be read: {error.strerror or error}") from error
            continue
        left -= len(listed)
        names = {entry.name for entry in listed}
        if _is_training_run(names):
            runs.append(folder)
        elif depth < MAX_DEPTH and "pyvenv.cfg" not in names:
            below = (entry for entry in listed if entry.is_dir(follow_symlinks=False))
            waiting += [(Path(entry.path), depth + 1) for entry in below if not entry.name.startswith(".")]
    return runs, not waiting


def _is_training_run(names: set[str]) -> bool:
    """Whether a folder with these entries is a training run: a lone config.yaml may be anything, and a sweep's
    directory is locked too."""
    traces = names & {LOCK_NAME, OUTCOME, METRICS, "summary.json"} or {CONFIG, OVERRIDES} <= names
    return bool(traces) and not names & {"profile.json", "check.json", SWEEP}


def read_row(directory: Path) -> RunRow:
    use = DiskUse.of(directory)
    files = RunReader(directory)
    try:
        state = files.state()
    except RunError as error:
        reason = str(error).removeprefix(f"{directory}: ")
        return RunRow(str(directory), DAMAGED, changed=use.changed, bytes=use.bytes, note=reason)
    launch, summary, metric = files.json("launch.json"), files.json("summary.json"), files.monitor
    rows = list(files.rows(sparse=True))
    evaluations = files.evaluations(rows)
    best = files.best(evaluations)
    trained = [row for row in rows if row.get("split") == "train"]
    notes = [problem.partition(";")[0] for problem in files.problems]
    return RunRow(
        str(directory),
        "crashed" if state is None else state.name,
        step=as_int(rows[-1].get("step"), MAX_STEPS) if rows else 0,
        steps=as_int(summary.get("steps", launch.get("steps")), MAX_STEPS),
        metric=metric,
        last=evaluations[-1].value if evaluations else None,
        best=None if best is None else best.value,
        best_step=None if best is None else best.step,
        train_loss=as_number(trained[-1].get("loss")) if trained else None,
        changed=use.changed,
        bytes=use.bytes,
        note="; ".join([*([state.reason] if state and state.reason else []), *notes]),
    )
