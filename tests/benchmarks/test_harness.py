"""The harness measures what it says: ratios within a round, failures by name, claims against bounds."""

from __future__ import annotations

import pytest

from benchmarks.claims import judge
from benchmarks.harness import Candidate, SystemResult, measure, ratio
from benchmarks.report import as_json, environment


def measured(system: str, *seconds: float) -> SystemResult:
    return SystemResult(system, list(seconds))


def test_a_ratio_is_taken_within_rounds_so_that_a_slow_round_does_not_count() -> None:
    assert ratio(measured("a", 1, 10, 1), measured("b", 2, 20, 2)) == 0.5


def test_claims_are_judged_by_their_bounds_and_only_where_all_was_measured() -> None:
    results = {
        result.system: result
        for result in (measured("gpipe", 0.6), measured("torchgpipe", 1.0), measured("plain", 0.9))
    }
    judged = {verdict.text: verdict for verdict in judge("mlp", results)}
    assert len(judged) == 2
    assert judged["time of gpipe / torchgpipe"].holds
    speed_up = judged["speed-up of gpipe over plain, same chunks, one thread"]
    assert speed_up.figure == pytest.approx(1.5)
    assert not speed_up.holds and speed_up.possible is None


def test_a_speed_up_stands_beside_what_two_threads_could_gain_without_waiting() -> None:
    taken = {"gpipe": 0.6, "plain": 0.9, "apart-2-threads": 0.5}
    (speed_up,) = judge("mlp", {system: measured(system, seconds) for system, seconds in taken.items()})
    assert speed_up.possible == pytest.approx(1.8 * 8 / 9)


def test_a_system_that_failed_is_not_judged() -> None:
    failed = SystemResult("torchgpipe", failure="ImportError")
    assert judge("mlp", {"gpipe": measured("gpipe", 1), "torchgpipe": failed}) == []


@pytest.mark.slow
def test_systems_take_turns_in_processes_of_their_own_and_agree_on_the_gradient() -> None:
    rounds = 2
    candidates = [Candidate("plain"), Candidate("gpipe"), Candidate("no such system")]
    plain, gpipe, missing = measure("tiny", candidates, rounds)
    assert len(plain.seconds) == len(gpipe.seconds) == rounds
    assert gpipe.squared_norm == pytest.approx(plain.squared_norm, rel=1e-6)
    assert plain.memory >= plain.memory_before > 0
    assert missing.seconds == []
    assert missing.failure is not None
    assert "KeyError: 'no such system'" in missing.failure
    document = as_json("tiny", [plain, gpipe, missing], [])
    assert document["systems"]["plain"]["seconds"] == plain.seconds


def test_the_environment_names_what_figures_depend_on() -> None:
    assert environment()["packages"]["torch"]
    assert environment()["cores"]
