from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpipe_cli.profiling import action_recorder
from gpipe_cli.profiling.action_recorder import ActionRecorder
from gpipe_cli.schedule.action import Action, Kind

DAY = 86_400.0
GPU = torch.device("cuda:0")


class Event:
    """An event of a device, which has the clock of the host; as torch, it answers in milliseconds of float32."""

    device = GPU

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return float(torch.tensor(1000 * (end.at - self.at), dtype=torch.float32))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(seconds=0.0, synchronized=count())
    monkeypatch.setattr(action_recorder.time, "perf_counter", lambda: now.seconds)
    monkeypatch.setattr(action_recorder, "record_timing_event", lambda stream: Event())
    monkeypatch.setattr(action_recorder, "current_stream", lambda device: None)
    monkeypatch.setattr(action_recorder, "synchronize", lambda devices: next(now.synchronized))
    return now


def test_after_a_day_times_were_8_ms_apart(clock: Any) -> None:
    record = ActionRecorder([GPU])
    for begin in (0.25, DAY + 0.25):
        clock.seconds = begin - 0.125
        record.clear()
        clock.seconds = begin
        started = record.now(GPU)
        clock.seconds = begin + 0.001
        record(Action(Kind.FORWARD, 0, 0), "forward", started, record.now(GPU))
        (piece,) = record.pieces()
        assert piece.begin == pytest.approx(begin, abs=1e-6)
        assert piece.end - piece.begin == pytest.approx(0.001, abs=1e-6)


def test_reading_the_pieces_waits_for_the_devices(clock: Any) -> None:
    record = ActionRecorder([GPU])
    before = next(clock.synchronized)
    record.pieces()
    assert next(clock.synchronized) == before + 2
