"""A new schedule is one .py and one .yaml: both come from outside here, and engines that can run it train with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Gpipe

# All micro-batches in pairs: two forwards, two backwards. No shipped schedule has this order.
PAIRS = """
from gpipe_cli.schedule import Action, Kind, ScheduleTraits

TRAITS = ScheduleTraits(name="pairs", torch_schedule={torch_schedule!r})


def order(partitions, chunks, devices):
    pairs = [range(first, min(first + 2, chunks)) for first in range(0, chunks, 2)]
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(
        tuple(Action(kind, partition, chunk) for pair in pairs for kind in kinds for chunk in pair)
        for partition in range(partitions)
    )
"""
SHORT = "\npairs = order\norder = lambda *sizes: tuple(actions[:-1] for actions in pairs(*sizes))\n"
TRAIN = (
    *("train", "--json", "model=mlp", "data=synthetic", "data.shape=[1,8,8]", "data.length=32"),
    *("batch_size=16", "steps=2", "chunks=4", "threads=1"),
)
PAIRED = ("--config-dir", "conf", "schedule=pairs", "allow=[own_schedules]")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes own_schedules/pairs.py and conf/schedule/pairs.yaml into the folder that commands run in."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source: str) -> None:
        for folder in ("own_schedules", "conf/schedule"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "own_schedules/pairs.py").write_text(source)
        text = "# Two forwards, two backwards.\nname: own_schedules.pairs\n"
        (tmp_path / "conf/schedule/pairs.yaml").write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_schedules"]:
        del sys.modules[name]


def loss(answer: Any) -> float:
    assert answer.code == 0, answer.err
    return float(answer.json["loss"])


def test_every_engine_that_runs_schedules_trains_with_it_and_to_the_same_bits(
    gpipe: Gpipe, own: Callable[[str], None]
) -> None:
    own(PAIRS.format(torch_schedule="Schedule1F1B"))
    expected = loss(gpipe(*TRAIN, "engine=single"))
    assert loss(gpipe(*TRAIN, *PAIRED)) == expected
    assert loss(gpipe(*TRAIN, *PAIRED, "engine.offload=cpu")) == expected
    assert loss(gpipe(*TRAIN, *PAIRED, "engine=processes")) == expected


def test_a_saved_run_that_names_it_resumes_only_if_the_command_line_allows_it(
    gpipe: Gpipe, own: Callable[[str], None]
) -> None:
    own(PAIRS.format(torch_schedule=None))
    loss(gpipe(*TRAIN, *PAIRED, "run_dir=run"))
    refused = gpipe("train", "resume=run", "steps=3")
    assert refused.code == 2
    assert refused.err.startswith("gpipe: error: add 'allow=[own_schedules]' to the command line")
    loss(gpipe("train", "--json", "resume=run", "steps=3", "allow=[own_schedules]"))


def test_without_permission_nothing_is_imported(gpipe: Gpipe, own: Callable[[str], None]) -> None:
    own("raise SystemExit('imported')")
    answer = gpipe(*TRAIN, "--config-dir", "conf", "schedule=pairs")
    assert answer.code == 2
    assert "schedule.name=own_schedules.pairs" in answer.err and "add 'allow=[own_schedules]'" in answer.err
    assert "own_schedules.pairs" not in sys.modules


@pytest.mark.parametrize(
    ("source", "engine", "message"),
    [
        (PAIRS, "single", "schedule: has no effect with engine=single; remove it"),
        (PAIRS, "offload", "schedule: has no effect with engine=offload; remove it"),
        (PAIRS, "processes", "torch.distributed.pipelining has no such schedule; use engine=threads"),
        (PAIRS.replace("{torch_schedule!r}", "'Other'"), "processes", "torch_schedule=Other is not"),
        (PAIRS + SHORT, "threads", "schedule=own_schedules.pairs: B0.3 is missing"),
        ("", "threads", "module 'own_schedules.pairs' does not define TRAITS and order"),
        ("import missing_for_tests", "threads", "No module named 'missing_for_tests'"),
    ],
)
def test_what_cannot_run_it_says_so_in_one_line(
    gpipe: Gpipe, own: Callable[[str], None], source: str, engine: str, message: str
) -> None:
    own(source.format(torch_schedule=None))
    answer = gpipe(*TRAIN, *PAIRED, f"engine={engine}")
    assert answer.code == 2
    error = answer.err.strip().splitlines()[-1]
    assert error.startswith("gpipe: error: ") and message in error, answer.err
    assert "Traceback" not in answer.err
