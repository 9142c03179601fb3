from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpipe_cli.launch.rank_files import NOT_IN_STEP, ExitReport, HeartbeatEngine, Heartbeats, RankFiles


def test_an_exit_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    report = ExitReport(5, "the loss is nan", time=3.5, summary={"loss": 0.25})
    files.write_exit_report(1, report)
    assert files.read_exit_report(1) == report and files.read_exit_report(0) is None
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]


@pytest.mark.parametrize(("code", "clean"), [(0, True), (75, True), (130, True), (1, False), (7, False)])
def test_a_rank_that_stopped_on_request_ended_cleanly(code: int, clean: bool) -> None:
    assert ExitReport(code).is_clean == clean


def test_the_run_directory_is_known_once_a_rank_has_written_it(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    assert files.read_run_directory() is None
    files.write_run_directory(Path("run"))
    assert files.read_run_directory() == Path("run")


class HeartbeatReader:
    """An engine whose step returns the heartbeats it can read."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self.heartbeats = heartbeats

    def train_step(self, *_: object, measure: bool) -> list[float]:
        return self.heartbeats.read()

    def eval_step(self, *_: object) -> None:
        raise ValueError("broken")


def test_a_heartbeat_lasts_as_long_as_its_step(tmp_path: Path) -> None:
    reader, writer = Heartbeats(tmp_path / "heartbeats", 2), Heartbeats(tmp_path / "heartbeats", 2)
    engine = HeartbeatEngine(HeartbeatReader(reader), writer, 1)  # type: ignore[arg-type]
    first, second = engine.train_step((), 0, 0.1)  # type: ignore[arg-type,misc]
    assert first == NOT_IN_STEP < second
    with pytest.raises(ValueError, match="broken"):
        engine.eval_step(())  # type: ignore[arg-type]
    assert reader.read() == [NOT_IN_STEP, NOT_IN_STEP]


def test_a_rank_that_waits_for_a_snapshot_in_its_step_counts_as_outside_of_it(tmp_path: Path) -> None:
    """A large snapshot may take longer to write than step_timeout."""
    heartbeats = Heartbeats(tmp_path / "heartbeats", 1)

    class Engine:
        wait: Callable[[], None]

        def before_update(self, wait: Callable[[], None]) -> None:
            self.wait = wait

    engine, seen = Engine(), []
    HeartbeatEngine(engine, heartbeats, 0).before_update(lambda: seen.append(heartbeats.read()))  # type: ignore[arg-type]
    engine.wait()
    assert heartbeats.read() == [NOT_IN_STEP]
    with heartbeats.in_step(0):
        began = heartbeats.read()
        engine.wait()
        assert heartbeats.read() > began
    assert seen == [[NOT_IN_STEP]] * 2
