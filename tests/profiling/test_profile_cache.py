from __future__ import annotations

import importlib
import json
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling import profile_cache
from gpipe_cli.profiling.layer_times import forward_times, layer_times
from gpipe_cli.profiling.phase_times import MeasuredPipeline, PhaseTimes
from gpipe_cli.profiling.profile_cache import (
    Drift,
    ProfileCache,
    default_folder,
    fingerprint,
    load_per_core,
    recheck_layers,
    recheck_phases,
)
from gpipe_cli.profiling.records import LayerTimes, Sample
from gpipe_cli.skip import pop, skippable, stash

SAMPLE = Sample(torch.zeros(2, 4))
CPU = torch.device("cpu")


def make_module(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU())


def pipeline(module: nn.Sequential, sample: Sample, balance: list[int]) -> MeasuredPipeline:
    return MeasuredPipeline(module, sample, balance, [CPU] * len(balance), chunks=4, cores=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A 1 for each time that layers were measured."""
    calls: list[float] = []

    def watched(module: nn.Sequential, sample: Sample, **_: object) -> Any:
        calls.append(1)
        return layer_times(module, sample, runs=1)

    monkeypatch.setattr(profile_cache, "layer_times", watched)
    return calls


@pytest.fixture(autouse=True)
def drift(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The multiple of the cached time that every check finds, if any is made; no clock is asked."""
    now = [1.0]
    monkeypatch.setattr(profile_cache, "recheck_layers", lambda *_: Drift("layer '0'", now[0]))
    monkeypatch.setattr(profile_cache, "recheck_phases", lambda *_: Drift("a pipeline", now[0]))
    return now


def test_what_was_measured_once_is_reused_and_said(tmp_path: Path, measured: list[float]) -> None:
    first, second = ProfileCache(tmp_path), ProfileCache(tmp_path)
    times = first.times(make_module(), SAMPLE)
    assert second.times(make_module(), SAMPLE) == times
    assert measured == [1]
    assert first.origin.startswith("layers measured in ")
    assert second.origin.endswith("took 1.00 x the cached time; balance.cache=false measures them again")
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_model_without_storage_reuses_and_cannot_be_measured(tmp_path: Path, measured: list[float]) -> None:
    times = ProfileCache(tmp_path).times(make_module(), SAMPLE)
    with torch.device("meta"):
        sketch, wider = make_module(), make_module(5)
    reused = ProfileCache(tmp_path, reuse=False)
    assert reused.times(sketch, SAMPLE) == times
    assert " reused unchecked, since nothing is run here" in reused.origin
    with pytest.raises(ConfigError, match="balance=time: nothing is run here"):
        ProfileCache(tmp_path).times(wider, SAMPLE)


@pytest.mark.parametrize("ratio", [1.9, 1.16, 1.14, 1.0, 0.86, 0.84, 0.5, float("inf")])
def test_cached_times_are_confirmed_or_measured_again_on_a_machine_that_was_loaded(
    tmp_path: Path, measured: list[float], drift: list[float], ratio: float
) -> None:
    """Times that were cached on a loaded machine misled later plans."""
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    profiles = ProfileCache(tmp_path)
    drift[:] = [ratio]
    profiles.times(make_module(), SAMPLE)
    found = f"layer '0' took {ratio:.2f} x the cached time"
    if 0.85 < ratio < 1.15:
        assert measured == [1] and profiles.outdated == []
        assert f" confirmed: {found}" in profiles.origin
    else:
        assert measured == [1, 1] and profiles.oldest is None
        assert profiles.origin.startswith("layers measured in ")
        assert profiles.origin.endswith(f" per core) no longer hold: {found}")


def test_a_measurement_that_ended_early_serves_a_run_of_the_same_length_only(
    tmp_path: Path, measured: list[float]
) -> None:
    """A dry run measured as briefly as its run would, and the run then measured again."""
    ProfileCache(tmp_path).measured_times(make_module(), SAMPLE, 100, 9)
    assert ProfileCache(tmp_path).stored_times(make_module(), SAMPLE, 100, 9) is not None
    assert ProfileCache(tmp_path).stored_times(make_module(), SAMPLE, 100, 10) is None
    assert ProfileCache(tmp_path).stored_times(make_module(), SAMPLE, 100) is None


@pytest.mark.parametrize(("load", "noted"), [(1.5, " (load 1.5 per core)"), (None, "")])
def test_the_cache_notes_how_busy_the_machine_was(
    tmp_path: Path,
    measured: list[float],
    monkeypatch: pytest.MonkeyPatch,
    load: float | None,
    noted: str,
) -> None:
    monkeypatch.setattr(profile_cache, "load_per_core", lambda: load)
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert document["load"] == load
    again = ProfileCache(tmp_path)
    again.times(make_module(), SAMPLE)
    assert again.origin.startswith(f"cached times of {document['measured']}{noted} confirmed: ")


@pytest.mark.parametrize(
    ("module", "sample"),
    [
        (make_module(5), SAMPLE),
        (nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU()), SAMPLE),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True)), SAMPLE),
        (nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.ReLU()), SAMPLE),
        (make_module().double(), Sample(torch.zeros(2, 4).double())),
        (make_module(), Sample(torch.zeros(3, 4))),
        (make_module(), Sample(torch.zeros(2, 4), torch.zeros(2, 3), nn.MSELoss())),
    ],
)
def test_whatever_changes_the_time_is_measured_anew(
    tmp_path: Path, measured: list[float], module: nn.Sequential, sample: Sample
) -> None:
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    ProfileCache(tmp_path).times(module, sample)
    assert measured == [1, 1]


def test_so_do_autocast_and_threads(tmp_path: Path, measured: list[float]) -> None:
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ProfileCache(tmp_path).times(make_module(), SAMPLE)
    torch.set_num_threads(2)
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    assert measured == [1, 1, 1]


def test_a_pipeline_is_measured_once_for_each_way_to_cut_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def watched(pipeline: MeasuredPipeline, *_: object, **__: object) -> PhaseTimes:
        calls.append(pipeline.balance)
        return PhaseTimes(1, 2, 3, 4, 5, 0.5, len(calls), 0.04)

    monkeypatch.setattr(MeasuredPipeline, "phase_times", watched)

    def phases(balance: list[int], profiles: ProfileCache) -> PhaseTimes:
        return profiles.phases(pipeline(make_module(), SAMPLE, balance), 1.0)

    first = ProfileCache(tmp_path)
    assert (
        phases([1, 1], first)
        == phases([1, 1], ProfileCache(tmp_path))
        == PhaseTimes(1, 2, 3, 4, 5, 0.5, 1, 0.04)
    )
    assert phases([2], first) == PhaseTimes(1, 2, 3, 4, 5, 0.5, 2, 0.04)
    assert phases([1, 1], ProfileCache(tmp_path, reuse=False)) == PhaseTimes(1, 2, 3, 4, 5, 0.5, 3, 0.04)
    assert calls == [[1, 1], [2], [1, 1]] and first.oldest is None
    again = ProfileCache(tmp_path)
    phases([2], again)
    assert again.oldest is not None


def test_a_pipeline_that_takes_another_time_now_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drift: list[float]
) -> None:
    results = iter([PhaseTimes(2, 4, 0, 0, 0, 0.5, 0.5, 0.04), PhaseTimes(1, 2, 0, 0, 0, 0.5, 0.5, 0.04)])
    monkeypatch.setattr(MeasuredPipeline, "phase_times", lambda *_, **__: next(results))
    profiles = ProfileCache(tmp_path)

    def phases() -> PhaseTimes:
        return profiles.phases(pipeline(make_module(), SAMPLE, [2]), 1.0)

    assert phases() == phases() and profiles.outdated == []
    # What differs by little holds, but is no more certain than that.
    drift[:] = [0.9]
    assert phases().spread == pytest.approx(0.1) and phases().forward == 2
    drift[:] = [0.5]
    assert phases().forward == 1
    assert profiles.outdated[0].endswith(" no longer hold: a pipeline took 0.50 x the cached time")


def test_so_does_the_source_of_a_class_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def print_of(operation: str) -> str:
        lines = [
            "from torch import nn",
            "class Own(nn.Module):",
            f"    def forward(self, input): return {operation}",
        ]
        (tmp_path / "own_for_cache_tests.py").write_text("\n".join(lines))
        monkeypatch.delitem(sys.modules, "own_for_cache_tests", raising=False)
        importlib.invalidate_caches()
        linecache.clearcache()
        own = importlib.import_module("own_for_cache_tests").Own()
        return str(fingerprint(nn.Sequential(own), SAMPLE)["model"])

    assert print_of("input * 2") == print_of("input * 2")
    assert print_of("input * 2") != print_of("input.exp().exp()")


def test_a_short_measurement_does_not_stand_for_a_long_one(tmp_path: Path, measured: list[float]) -> None:
    ProfileCache(tmp_path).measured_times(make_module(), SAMPLE, 2.0)
    found = [
        ProfileCache(tmp_path).stored_times(make_module(), SAMPLE, seconds) for seconds in (1.0, 2.0, 3.0)
    ]
    assert [times is not None for times in found] == [True, True, False]


def test_without_reuse_times_are_measured_and_kept(tmp_path: Path, measured: list[float]) -> None:
    ProfileCache(tmp_path, reuse=False).times(make_module(), SAMPLE)
    ProfileCache(tmp_path, reuse=False).times(make_module(), SAMPLE)
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    assert measured == [1, 1]


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        document = json.loads(text)
        changed = change(document)
        return json.dumps(document if changed is None else changed)

    return edit


DAMAGES: dict[str, Callable[[str], str]] = {
    "torn": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: "[]",
    "deep": lambda text: "[" * 100_000,
    "a format that does not tell the load": edited(lambda document: document.update(format=2)),
    "a hostile load": edited(lambda document: document.update(load="much")),
    "another model": edited(lambda document: document["key"].update(model="x")),
    "too few layers": edited(lambda document: document["numbers"].pop()),
    "words": edited(lambda document: document["numbers"].__setitem__(0, ["a", 1])),
    "negative": edited(lambda document: document["numbers"].__setitem__(0, [-1, 1])),
    "infinite": lambda text: text.replace('"seconds": 0.0', '"seconds": Infinity'),
    "not a number": edited(lambda document: document["numbers"].__setitem__(0, [float("nan"), 1])),
    "no date": edited(lambda document: document.update(measured=5)),
    "huge": lambda text: text + " " * (profile_cache.MAX_BYTES + 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_hostile_file_is_ignored_and_said(
    tmp_path: Path, measured: list[float], damage: Callable[[str], str]
) -> None:
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    (path,) = tmp_path.iterdir()
    path.write_text(damage(path.read_text()))
    messages: list[str] = []
    times = ProfileCache(tmp_path, warn=messages.append).times(make_module(), SAMPLE)
    assert measured == [1, 1] and len(times) == 2
    assert len(messages) == 1 and f"{path} is not a measurement and is ignored: " in messages[0]
    # What took its place is sound again.
    ProfileCache(tmp_path).times(make_module(), SAMPLE)
    assert measured == [1, 1]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    )
)
def test_no_document_is_taken_for_times_that_is_none(document: Any) -> None:
    with pytest.raises(ValueError, match="it "):
        profile_cache._checked(document, {"layers": 2}, 2, 2)


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, measured: list[float]) -> None:
    (tmp_path / "file").write_text("")
    messages: list[str] = []
    times = ProfileCache(tmp_path / "file", warn=messages.append).times(make_module(), SAMPLE)
    assert isinstance(times[0], LayerTimes)
    assert any("cannot store the measurement for the next run" in line for line in messages)


def test_the_folder_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "gpipe" / "profiles"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_folder() == Path.home() / ".cache" / "gpipe" / "profiles"


# The check of cached times. The tests set how long a run takes; no clock is involved.

WITH_LOSS = Sample(torch.zeros(2, 4), torch.zeros(2, 4), functional.mse_loss)
WITHOUT_LOSS = Sample(torch.zeros(2, 4))


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def running(monkeypatch: pytest.MonkeyPatch, *runs: list[float]) -> None:
    monkeypatch.setattr(profile_cache, "forward_times", lambda *_: list(runs))


def test_one_disturbed_run_does_not_cost_a_good_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, [9.0, 50.0, 1.0], [1.0, 10.5, 1.0], [4.0, 30.0, 1.0])
    drift = recheck_layers(layers(3), WITH_LOSS, [1.0, 10.0, 1.0])
    assert drift.tolerable and str(drift) == "layer '1' took 1.05 x the cached time"


def test_a_measurement_of_a_loaded_machine_is_found_out_by_its_costliest_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running(monkeypatch, *[[1.0, 10.0, 1.0]] * 3)
    drift = recheck_layers(layers(3), WITH_LOSS, [1.0, 19.0, 1.0])
    assert not drift.tolerable and str(drift) == "layer '1' took 0.53 x the cached time"
    assert not recheck_layers(layers(3), WITH_LOSS, [0.0, 0.0, 0.0]).tolerable


def test_of_equal_layers_half_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costliest one of many equal layers is the one that was disturbed most; alone it would never be confirmed."""
    running(monkeypatch, *[[1.0] * 6] * 3)
    drift = recheck_layers(layers(6), WITHOUT_LOSS, [1.0, 1.3, 1.0, 1.0, 1.0, 1.0])
    assert drift.tolerable and drift.what == "layer '1' and 2 more"


def test_the_layer_whose_time_contains_the_loss_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, *[[1.0, 10.0]] * 3)
    assert recheck_layers(layers(2), WITH_LOSS, [1.0, 20.0]).tolerable
    assert not recheck_layers(layers(2), WITHOUT_LOSS, [1.0, 20.0]).tolerable
    running(monkeypatch, [1.0])
    assert recheck_layers(layers(1), WITH_LOSS, [1.0]).what == "layer '0'"


@pytest.mark.parametrize(
    ("taken", "ratio", "runs"), [([3.1], 3.1 / 3, 1), ([9.0, 3.0], 1.0, 2), ([6.0, 4.5, 9.0], 1.5, 3)]
)
def test_a_pipeline_is_run_again_until_it_agrees_three_times_at_most(
    monkeypatch: pytest.MonkeyPatch, taken: list[float], ratio: float, runs: int
) -> None:
    now = iter(taken)
    monkeypatch.setattr(MeasuredPipeline, "forward_and_backward", lambda *_: next(now))
    drift = recheck_phases(pipeline(layers(2), WITH_LOSS, [1, 1]), cached_ms=3.0)
    assert drift.ratio == pytest.approx(ratio) and drift.what == "a pipeline of 2 partitions"
    assert not list(now) and len(taken) == runs


def test_a_pipeline_of_one_partition_is_called_the_model_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MeasuredPipeline, "forward_and_backward", lambda *_: 3.0)
    drift = recheck_phases(pipeline(layers(2), WITH_LOSS, [2]), cached_ms=3.0)
    assert drift is not None and drift.what == "the model in one piece"


@skippable(stash=["x"])
class Keep(nn.Module):
    def forward(self, input: Tensor) -> Any:
        yield stash("x", input)
        return input * 1


@skippable(pop=["x"])
class Add(nn.Module):
    def forward(self, input: Tensor) -> Any:
        return input + (yield pop("x"))


def test_any_model_can_be_checked_and_is_left_as_it_was() -> None:
    model = nn.Sequential(Keep(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), Add()).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    runs = forward_times(model, WITH_LOSS, 3)
    assert [len(run) for run in runs] == [5, 5, 5] and min(map(min, runs)) > 0
    drift = recheck_phases(pipeline(model, WITH_LOSS, [3, 2]), 1.0)
    assert drift.ratio > 0
    assert torch.equal(generator, torch.get_rng_state()) and not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_gradients_of_the_caller_are_not_thrown_away() -> None:
    model = layers(2)
    model(WITH_LOSS.input).sum().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient"):
        recheck_layers(model, WITH_LOSS, [1.0, 1.0])
    assert model[0].weight.grad is not None


def test_the_load_is_told_per_core_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert load_per_core() == 1.5

    def unknown() -> Any:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert load_per_core() is None
