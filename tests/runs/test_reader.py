from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_cli.errors import ConfigError, NumericError, RunError, Stopped
from gpipe_cli.runs.directory import lock_run_directory, recorded_outcome
from gpipe_cli.runs.reader import LOCK_NAME, OUTCOME, RunState, run_state
from tests.support.command_line import Gpipe

HOLD_LOCK = """
import sys
from pathlib import Path
from gpipe_cli.runs.directory import lock_run_directory
with lock_run_directory(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    return tmp_path


def test_a_run_is_running_while_another_process_holds_its_lock_and_crashed_once_that_is_killed(
    run: Path,
) -> None:
    root = str(Path(sys.modules["gpipe_cli"].__file__ or "").parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        assert run_state(run) == RunState("running")
        (run / "summary.json").write_text("{}")  # of a finished run that is being trained further
        assert run_state(run) == RunState("running")
        with pytest.raises(ConfigError, match="in use by process"), lock_run_directory(run):
            pass
        holder.send_signal(signal.SIGKILL)
    (run / "summary.json").unlink()
    assert (run / LOCK_NAME).exists()
    assert run_state(run) == RunState("crashed")


def test_asking_for_the_state_of_its_own_run_does_not_release_the_lock(run: Path) -> None:
    """The bug this prevents: closing any descriptor of a locked file releases the record lock of the process."""
    ask = "import sys; from pathlib import Path; from gpipe_cli.runs.reader import run_state; "
    ask += "print(run_state(Path(sys.argv[1])).name)"
    with lock_run_directory(run):
        assert run_state(run) == RunState("running")
        seen = subprocess.run(
            [sys.executable, "-c", ask, str(run)], capture_output=True, text=True, check=True
        )
        assert seen.stdout == "running\n"
        (run / "summary.json").write_text("{}")
        assert run_state(run) == RunState("finished")


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Stopped("stopped by SIGTERM"), RunState("stopped", "stopped by SIGTERM")),
        (KeyboardInterrupt(), RunState("stopped", "KeyboardInterrupt")),
        (NumericError("the loss is nan"), RunState("failed", "the loss is nan")),
        (ZeroDivisionError("in a layer"), RunState("failed", "ZeroDivisionError: in a layer")),
    ],
)
def test_the_error_that_ends_a_run_decides_its_state(
    run: Path, error: BaseException, state: RunState
) -> None:
    with pytest.raises(type(error)), recorded_outcome(run):
        raise error
    assert run_state(run) == state


def test_a_failure_to_record_the_outcome_does_not_hide_the_error(run: Path) -> None:
    (run / OUTCOME).mkdir()
    with pytest.raises(NumericError), recorded_outcome(run):
        raise NumericError("the loss is nan")


def test_a_directory_without_a_run_has_no_state(tmp_path: Path) -> None:
    assert run_state(tmp_path) is None
    assert run_state(tmp_path / "missing") is None


def test_a_training_run_records_that_it_failed_and_forgets_it_when_it_finishes(
    tiny: Gpipe,
) -> None:
    words = ("train", "steps=2", "run_dir=run", "resume=auto")
    assert tiny(*words, "optimizer.lr=1e30").code == 5
    state = run_state(Path("run"))
    assert state is not None and state.name == "failed" and "loss" in state.reason
    assert tiny(*words, "optimizer.lr=0.1").code == 0
    assert run_state(Path("run")) == RunState("finished")
    assert not Path("run", OUTCOME).exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"state": "happy", "reason": ""}', '{"state": "failed"}'])
def test_a_damaged_outcome_is_an_error(run: Path, content: str) -> None:
    (run / OUTCOME).write_text(content)
    with pytest.raises(RunError, match="its state cannot be read"):
        run_state(run)


@pytest.mark.parametrize("name", [OUTCOME, LOCK_NAME])
def test_a_named_pipe_or_a_link_in_place_of_a_file_is_an_error(run: Path, name: str) -> None:
    os.mkfifo(run / name)
    with pytest.raises(RunError, match="is a named pipe, not a regular file"):
        run_state(run)
    (run / name).unlink()
    (run / name).symlink_to("/dev/zero")
    with pytest.raises(RunError, match="is a symbolic link"):
        run_state(run)
