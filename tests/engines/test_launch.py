"""The launcher with ranks that only act: real processes, which need no torch and so no time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpipe_cli
from gpipe_cli.engines import watch
from gpipe_cli.engines.launch import Crew, Failed, launch
from gpipe_cli.engines.meeting import Beats, LastWord, Meeting
from gpipe_cli.errors import GpipeError, NumericError, PeerError, PeerRaised, StepTimeout

RANK = Path(__file__).with_name("acting_rank.py")
PLACES = ("partition 0", "partition 1")


@pytest.fixture(autouse=True)
def same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(gpipe_cli.__file__).parents[1]))


def started(
    part: str, step_timeout: float | None = None, asked: Callable[[Meeting], int | None] = lambda _: None
) -> LastWord:
    meetings: list[Meeting] = []

    def entry(meeting: Meeting) -> list[str]:
        meetings.append(meeting)
        return [str(RANK), str(meeting.folder), part]

    try:
        return launch(Crew(PLACES, step_timeout, lambda: asked(meetings[0])), entry)
    finally:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert not [child for child in children if is_rank(child)] and not meetings[0].folder.exists()


def is_rank(child: str) -> bool:
    return RANK.name.encode() in Path(f"/proc/{child}/cmdline").read_bytes()


def test_what_rank_0_found_comes_back() -> None:
    assert started("ends well").summary == {"loss": 0.5}


@pytest.mark.parametrize(
    ("part", "kind", "says"),
    [
        ("is killed", PeerError, r"rank 1 \(partition 1\) was killed by SIGKILL, perhaps because memory"),
        ("ends without a word", PeerError, r"rank 1 \(partition 1\) ended without a word"),
        ("finds nan", NumericError, r"rank 1 \(partition 1\): the loss is nan"),
        ("raises", PeerRaised, r"rank 1 \(partition 1\): ValueError: broken"),
        ("is stopped", StepTimeout, r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5 seconds"),
        (
            "is stopped while it starts",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5",
        ),
        (
            "is stopped between steps",
            StepTimeout,
            r"rank 1 \(partition 1\): stopped .* within step_timeout=0.5",
        ),
        ("waits for ever", StepTimeout, r"rank 0 .* and rank 1 .*: in a step that does not end"),
    ],
)
def test_one_rank_brings_all_down_and_is_named(part: str, kind: type[GpipeError], says: str) -> None:
    with pytest.raises(Failed, match=says) as failed:
        started(part, step_timeout=0.5 if "step" in says else None)
    assert type(failed.value.cause) is kind
    assert failed.value.may_pass == (kind in (PeerError, StepTimeout))


def test_a_launcher_that_was_stopped_itself_does_not_count_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z stops the launcher and all its ranks; `fg` an hour later used to end them as too slow."""
    meeting, now = Meeting(tmp_path), [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watching = watch.Watch(meeting, 1, lambda: {0: os.getpid()}, 2.0, lambda: None)
    assert watching._meet_ranks()
    monkeypatch.setattr(watching, "_kill_all", lambda: None)
    Beats(meeting.beats, 1).begin(0)
    late = []
    for passed in (0.1, 3600, 0.5, 0.6):
        now[0] += passed
        watching._look_for_frozen()
        late.append(watching.late)
    assert late == [[], [], [], [0]]


def test_a_signal_to_the_launcher_reaches_every_rank() -> None:
    def asked(meeting: Meeting) -> int | None:
        ready = all((meeting.folder / f"ready-{rank}").exists() for rank in (0, 1))
        return signal.SIGUSR1 if ready else None

    assert started("heeds a request", asked=asked).text == "stopped"


def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    started("ends well")
    assert dict(os.environ) == before and sys.executable
