from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpipe_cli.report.progress import RunSize
from gpipe_cli.runs.recorder import EvaluationForecast
from gpipe_cli.training.loop import EvalProgress
from tests.support.command_line import Gpipe, UserModule

LOGGERS = """
class Logger:
    def __init__(self, fails_at, opens):
        self.fails_at, self.opens = fails_at, opens

    def open(self, run):
        if not self.opens:
            raise OSError("no network")
        self.file = (run.directory / "seen.txt").open("a")
        self.file.write(f"{run.name.split()[0]} {run.step} {run.config['chunks']}\\n")

    def write(self, step, values):
        if step == self.fails_at:
            raise ConnectionError("gone")
        self.file.write(f"{step} {' '.join(values)}\\n")

    def close(self):
        self.file.close()


def build(fails_at: int = 0, opens: bool = True):
    return Logger(fails_at, opens)
"""
OWN = ("logger._target_=own_loggers.build", "allow=[tiny_for_tests,own_loggers]")


@pytest.fixture
def logged(tiny: Gpipe, user_module: UserModule) -> Gpipe:
    user_module("own_loggers", LOGGERS)
    return lambda *words: tiny("train", "run_dir=here", *OWN, *words)


def test_a_custom_logger_gets_every_row(logged: Gpipe) -> None:
    assert logged("epochs=1").code == 0
    first, *rows = Path("here/seen.txt").read_text(encoding="utf-8").splitlines()
    assert first == "build 0 3"
    assert [row.split()[0] for row in rows] == ["1", "2", "3", "4", "4"]
    assert "train/loss train/top1 train/top5 train/lr train/samples_per_second" in rows[0]
    assert "eval/loss" in rows[-1] and "eval/seconds" not in rows[-1]


def test_an_evaluation_much_longer_than_its_training_says_so_once_with_the_key_that_limits_it() -> None:
    """AlexNet on CIFAR-10, steps=4: 11 s of training, then 183 s of evaluation without a word."""
    forecast = EvaluationForecast(RunSize(steps=4, epochs=1, eval_batches=157), 0.0)
    done = [EvalProgress(4, 0, batches, 11.0 + 1.165 * batches) for batches in range(158)]
    lines = list(filter(None, map(forecast.line, done)))
    assert lines == [
        "this evaluation takes about 3:03, and the training before it took 0:11; limit it with eval.batches=9, "
        "eval.every=<steps> or eval=none"
    ]
    assert forecast.line(done[1]) is None
    later = EvaluationForecast(RunSize(steps=4, epochs=1, eval_batches=157), 0.0)
    later.since = 5.0  # there was an evaluation before, which is no training
    short = [EvalProgress(8, 0, batches, 105.0 + 1.165 * batches) for batches in range(158)]
    assert not any(map(later.line, short)), "less than twice as long"


def test_training_continues_without_a_logger_that_fails(logged: Gpipe) -> None:
    answer = logged("+logger.fails_at=2", "epochs=1")
    assert answer.code == 0
    assert (
        answer.err.count("warning: the logger failed; training continues without it: ConnectionError: gone")
        == 1
    )
    assert len(Path("here/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 5


def test_a_logger_that_cannot_start_ends_the_run_before_the_first_step(logged: Gpipe) -> None:
    answer = logged("+logger.opens=false")
    assert answer.code == 6
    assert "logger: cannot start: OSError: no network; set logger=none to train without it" in answer.err


@pytest.mark.parametrize("option", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    option: str, tiny: Gpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, option, None)
    answer = tiny("train", f"logger={option}", "run_dir=here")
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert f"install it: pip install {option}\n" in answer.err and not Path("here").exists()
