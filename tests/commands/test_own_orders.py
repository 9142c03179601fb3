"""schedule=auto and schedule=file: the order is found or read, timed, run, saved with the run, and repeated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpipe_cli.plan import for_training, measured, order_plans
from gpipe_cli.schedule import order
from gpipe_cli.schedule.files import read_schedule, schedule_text
from gpipe_cli.schedule.orders import zero_bubble_v
from tests.support.command_line import Gpipe, UserModule

TWO = "devices=[cpu,cpu]"
NORMED = """
from torch import nn


def build(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.fixture(autouse=True)
def _measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "SECONDS_OF_PHASES", 0.0)
    monkeypatch.setattr(order_plans, "POLICIES", 20)


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return load_file(max(Path(run_dir).glob("snapshots/step-*/model.safetensors")))


def write(path: str, made: Any) -> str:
    Path(path).write_text(schedule_text(made, is_csv=path.endswith(".csv")))
    return f"schedule.path={path}"


def resume(gpipe: Gpipe, run: str, *words: str) -> Any:
    return gpipe("train", f"resume={run}", "allow=[tiny_for_tests]", *words)


def equal(first: str, second: str) -> bool:
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_searched_order_is_timed_saved_and_gives_the_bits_of_every_schedule(tiny: Gpipe) -> None:
    assert tiny("train", "run_dir=plain", "steps=2", "chunks=3", TWO).code == 0
    answer = tiny("train", "run_dir=auto", "steps=2", "chunks=3", TWO, "schedule=auto")
    assert answer.code == 0
    line = next(line for line in answer.err.splitlines() if "per step predicted" in line)
    assert line.startswith("schedule=auto (costs measured") and "1f1b: " in line and "lower bound" in line
    # It names what it chose and the gain, or that the measurements are too uncertain for one.
    assert "): an order of its own, " in line or "): the order of " in line
    assert "; gain " in line or "; no measurable gain" in line
    saved = read_schedule("auto/schedule.csv")
    assert (saved.partitions, len(saved.given), saved.chunks) == (2, 2, 3)
    assert equal("plain", "auto")


def test_a_resumed_run_repeats_its_order_unless_you_ask_for_another(tiny: Gpipe, gpipe: Gpipe) -> None:
    words = ("steps=1", "chunks=4", TWO)
    assert tiny("train", "run_dir=run", *words, "schedule=auto").code == 0
    other = schedule_text(order("gpipe", 2, 4, 2), is_csv=True)
    Path("run/schedule.csv").write_text(other)
    resumed = resume(gpipe, "run", "steps=2")
    assert resumed.code == 0 and "measuring" not in resumed.err
    assert Path("run/schedule.csv").read_text() == other
    assert "schedule=auto (costs" in resume(gpipe, "run", "steps=3", "schedule=auto").err
    assert Path("run/schedule.csv").read_text() != other
    again = resume(gpipe, "run", "steps=4", "chunks=2")
    assert "the order of the run is for 2 partitions on 2 devices and 4 chunks" in again.err
    assert read_schedule("run/schedule.csv").chunks == 2
    single = resume(gpipe, "run", "steps=5", "engine=single", "devices=1")
    assert single.code == 0 and Path("run/schedule.csv").exists()
    Path("run/schedule.csv").write_text("0F0,nonsense\n")
    damaged = resume(gpipe, "run", "steps=6", "engine=threads", TWO)
    assert damaged.code == 4
    assert "'nonsense' is not an action such as 0F1; repair it, or add schedule=auto" in damaged.err
    Path("run/schedule.csv").rename("elsewhere.csv")
    Path("run/schedule.csv").symlink_to("../elsewhere.csv")
    linked = resume(gpipe, "run", "steps=6", "engine=threads", TWO)
    assert linked.code == 4 and "is a symbolic link, not a regular file; repair it, or add" in linked.err


def test_a_file_may_place_partitions_there_and_back(tiny: Gpipe, gpipe: Gpipe) -> None:
    words = ("steps=2", "chunks=3", TWO)
    assert tiny("train", "run_dir=plain", *words).code == 0
    path = write("v.txt", zero_bubble_v(4, 3, 2))
    answer = tiny("train", "run_dir=v", *words, "partitions=4", "schedule=file", path)
    assert answer.code == 0
    assert "schedule.path=v.txt (costs measured" in answer.err and "interleaved: " in answer.err
    assert equal("plain", "v")
    assert read_schedule("v/schedule.csv").given == read_schedule("v.txt").given
    Path("v.txt").unlink()
    assert resume(gpipe, "v", "steps=3").code == 0
    assert tiny("eval", "run=v", "allow=[tiny_for_tests]").code == 0


@pytest.mark.slow
def test_two_partitions_per_device_are_also_tried_there_and_back(tiny: Gpipe) -> None:
    answer = tiny("train", "run_dir=v", "steps=1", "chunks=4", TWO, "partitions=4", "schedule=auto")
    assert answer.code == 0
    assert read_schedule("v/schedule.csv").TRAITS.workers in ((0, 1, 0, 1), (0, 1, 1, 0))


WRONG = """
schedule=file => schedule.path: give the file with the order, such as
schedule=auto schedule.path=x.csv => schedule.path=x.csv: has no effect with schedule=auto
schedule.path=x.csv => schedule.path=x.csv: has no effect with schedule=gpipe; add schedule=file
schedule=file schedule.path=x.csv => schedule.path=x.csv: no such file
schedule=file schedule.path=. => schedule.path=.: cannot be read as a schedule
schedule=file schedule.path=word.csv => schedule.path=word.csv, line 1: 'F0.0' is not an action
schedule=file schedule.path=illegal.csv => error: schedule.path=illegal.csv: B0.1 is missing
schedule=file schedule.path=good.csv chunks=3 => good.csv: the order is for 2 partitions on 2 devices and 2 chunks, \
and there are 2 partitions on 2 devices and 3 chunks; give chunks=2
schedule=file schedule.path=good.csv batch_size=1 => on 2 devices and 1 chunks; give a larger batch_size
schedule=file schedule.path=good.csv devices=[cpu,cpu,cpu] => there are 3 partitions on 3 devices and 2 chunks; \
give partitions=2, devices=2
schedule=auto engine=single => schedule: has no effect with engine=single; remove it
schedule=auto engine=offload => schedule: has no effect with engine=offload; remove it
schedule=aoto => schedule=aoto
schedule=auto devices=[cpu,cpu] partitions=1 => partitions=1: each partition needs its own device
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_a_wrong_order_is_refused_in_one_line(tiny: Gpipe, row: str) -> None:
    words, message = row.split(" => ")
    Path("word.csv").write_text("F0.0\n")
    Path("illegal.csv").write_text("0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n")
    write("good.csv", order("1f1b", 2, 2, 2))
    answer = tiny("train", "steps=1", *(() if "chunks=" in words else ("chunks=2",)), *words.split())
    assert answer.code == 2 and message in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not Path("runs").exists()


def test_an_order_keeps_within_device_memory_where_a_schedule_does_not(tiny: Gpipe) -> None:
    words = ("steps=1", "chunks=8", TWO, "batch_size=64", "checkpoint=never")
    words = (*words, "balance=manual", "balance.layers=[5,3]")
    small = "device_memory=40KiB"
    assert "needs" in tiny("train", *words, small, "schedule=1f1b").err
    assert tiny("train", *words, small, "schedule=auto").code == 0
    path = write("gpipe.csv", order("gpipe", 2, 8, 2))
    refused = tiny("train", *words, small, "schedule=file", path)
    assert refused.code == 2 and "balance [5, 3] needs" in refused.err


def test_the_device_with_the_most_partitions_of_a_file_decides_whether_it_fits(tiny: Gpipe) -> None:
    """The limit was divided by the mean number of partitions per device."""
    Path("even.txt").write_text("F0.0 F1.0 B1.0 B0.0\nF2.0 F3.0 B3.0 B2.0\n")
    Path("uneven.txt").write_text("F0.0 F1.0 F2.0 B2.0 B1.0 B0.0\nF3.0 B3.0\n")
    words = ("chunks=1", TWO, "partitions=4", "device_memory=1KiB")
    words = (*words, "balance=manual", "balance.layers=[2,2,2,2]")
    needed = []
    for path in ("even.txt", "uneven.txt"):
        refused = tiny("train", *words, "schedule=file", f"schedule.path={path}")
        found = re.search(r"balance \[2, 2, 2, 2\] needs ([\d.]+)KiB", refused.err)
        assert refused.code == 2 and found is not None, refused.err
        needed.append(float(found[1]))
    assert needed[1] == pytest.approx(1.5 * needed[0], rel=0.01)


def test_a_balance_reads_the_file_too(tiny: Gpipe) -> None:
    refused = tiny("balance", "chunks=2", TWO, "schedule=file", "schedule.path=x.csv")
    assert refused.code == 2 and "schedule.path=x.csv: no such file" in refused.err
    path = write("good.csv", order("1f1b", 2, 2, 2))
    assert tiny("balance", "chunks=2", TWO, "schedule=file", path, "--by", "params").code == 0


def test_batch_norm_that_reduced_the_chunks_keeps_the_order_of_the_run(
    gpipe: Gpipe, user_module: UserModule
) -> None:
    words = ("steps=1", "chunks=4", "batch_size=6", TWO, "schedule=auto")
    user_module("normed", NORMED)
    model = ("model._target_=normed.build", "allow=[normed]", "data=synthetic", "data.shape=[4]")
    assert gpipe("train", *model, "run_dir=run", *words).code == 0
    assert read_schedule("run/schedule.csv").chunks == 3
    resumed = gpipe("train", "resume=run", "allow=[normed]", "steps=2")
    assert resumed.code == 0 and "searching again" not in resumed.err and "measuring" not in resumed.err


def test_a_model_that_one_device_cannot_hold_is_estimated(
    tiny: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(for_training, "measure_costs", measure)
    answer = tiny("train", "steps=1", "chunks=4", TWO, "schedule=auto")
    assert answer.code == 0
    assert "estimated from FLOPs, since its layers do not fit on one device" in answer.err


@pytest.mark.slow
def test_a_dry_run_estimates_and_a_profile_draws_the_order(tiny: Gpipe) -> None:
    dry = tiny("train", "--dry-run", "chunks=4", TWO, "schedule=auto")
    assert dry.code == 0 and "estimated from FLOPs, since the model is not run here" in dry.err
    assert not Path("runs").exists()
    profile = tiny("profile", "timeline=true", "steps=1", "chunks=4", TWO, "schedule=auto", "seconds=0.1")
    assert profile.code == 0 and "schedule=auto (costs" in profile.err


@pytest.mark.slow
def test_ranks_get_the_order_of_their_launcher_and_the_same_bits(tiny: Gpipe, gpipe: Gpipe) -> None:
    words = ("steps=2", "chunks=4", TWO, "partitions=4", "schedule=auto")
    assert tiny("train", "run_dir=threads", *words).code == 0
    assert tiny("train", "run_dir=ranks", *words, "engine=processes").code == 0
    one = weights("threads")
    other: dict[str, torch.Tensor] = {}
    for path in Path("ranks").glob("snapshots/step-00000002/model-*.safetensors"):
        other |= load_file(path)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    resumed = resume(gpipe, "ranks", "steps=3")
    assert resumed.code == 0 and "measuring" not in resumed.err


@pytest.mark.slow
def test_ranks_of_unequal_numbers_of_partitions_can_be_evaluated(tiny: Gpipe, gpipe: Gpipe) -> None:
    """Evaluation used the interleaved schedule in place of the order, which torch refuses for 3 in 2 processes."""
    words = ("steps=1", "chunks=4", TWO, "partitions=3", "schedule=auto", "engine=processes")
    assert tiny("train", "run_dir=ranks", *words).code == 0
    evaluated = gpipe("eval", "run=ranks", "allow=[tiny_for_tests]", "--json")
    assert evaluated.code == 0, evaluated.err
    alone = gpipe("eval", "run=ranks", "allow=[tiny_for_tests]", "engine=single", "devices=1", "--json")
    assert evaluated.json["loss"] == alone.json["loss"]
