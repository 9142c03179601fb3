from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_cli.engines.beating import BeatingEngine
from gpipe_cli.engines.meeting import NOT_IN_A_STEP, Beats, LastWord, Meeting


def test_a_last_word_is_read_as_it_was_said(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    word = LastWord(5, "the loss is nan", when=3.5, summary={"loss": 0.25})
    meeting.say_last(1, word)
    assert meeting.last_word(1) == word and meeting.last_word(0) is None
    assert [one.name for one in tmp_path.iterdir()] == ["rank-1.json"]


@pytest.mark.parametrize(("code", "in_order"), [(0, True), (75, True), (130, True), (1, False), (7, False)])
def test_a_rank_that_stopped_where_it_was_asked_to_is_in_order(code: int, in_order: bool) -> None:
    assert LastWord(code).in_order == in_order


def test_the_run_is_known_once_it_has_a_directory(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    assert meeting.run() is None
    meeting.tell_run(Path("run"))
    assert meeting.run() == Path("run")


class Stepping:
    """An engine that says what it sees of its own beat."""

    def __init__(self, beats: Beats) -> None:
        self.beats = beats

    def train_step(self, *_: object) -> list[float]:
        return self.beats.since()

    def eval_step(self, *_: object) -> None:
        raise ValueError("broken")


def test_a_beat_lasts_as_long_as_a_step(tmp_path: Path) -> None:
    seen, own = Beats(tmp_path / "beats", 2), Beats(tmp_path / "beats", 2)
    engine = BeatingEngine(Stepping(seen), own, 1)  # type: ignore[arg-type]
    first, second = engine.train_step((), 0, 0.1)  # type: ignore[arg-type,misc]
    assert first == NOT_IN_A_STEP < second
    with pytest.raises(ValueError, match="broken"):
        engine.eval_step(())  # type: ignore[arg-type]
    assert seen.since() == [NOT_IN_A_STEP, NOT_IN_A_STEP]
