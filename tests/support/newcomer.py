"""The paths of a new user in a fresh venv, from installing to predictions: `python -m tests.support.newcomer [FOLDER]`.

Every next command that gpipe prints is run exactly as it is printed. The session uses nothing of the repository except
what it installs from it, and writes to a single folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT = 900
COMMANDS = "train|eval|predict|balance|profile|plan|report|runs|export|ls|cp"
OFFERED = re.compile(rf"(?:^|[\s`>])(gpipe (?:{COMMANDS}) [^`<>]*)")
STOPPED_BY_CTRL_C = 130
WRONG_CONFIGURATION = 2


@final
@dataclass
class UserSession:
    folder: Path
    already_run: set[str] = field(default_factory=set)

    def install(self) -> None:
        self._call([sys.executable, "-m", "venv", "venv"])
        pip = [str(self.folder / "venv/bin/pip"), "install", "--quiet"]
        self._call([*pip, "-c", str(REPOSITORY / "constraints.txt"), str(REPOSITORY)])

    def run(self, line: str) -> list[str]:
        """Run a command line and return the next commands that it offers."""
        self.already_run.add(line)
        return _offered(self._call(shlex.split(line)), line)

    def run_offered(self, lines: Sequence[str]) -> None:
        """Run the offered commands as they were printed, each of them once in a session."""
        assert lines, "no next command was printed"
        for line in lines:
            if line not in self.already_run:
                self.run(line)

    def json(self, line: str) -> Any:
        """Run a command line and read the document on its stdout."""
        return json.loads(self._answer(shlex.split(line)).stdout)

    def refused(self, line: str) -> str:
        """Run a command line that must end with the exit code of a wrong configuration; its message."""
        return self._answer(shlex.split(line), code=WRONG_CONFIGURATION).stderr

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def write_images(self, name: str, classes: Sequence[str], images: int) -> None:
        """A folder for each class, with gray images of a shade of its own."""
        for index, of_class in enumerate(classes):
            (self.folder / name / of_class).mkdir(parents=True)
            for number in range(images):
                shade = bytes([60 * index + number]) * (40 * 40)
                header = b"P5 40 40 255\n"
                (self.folder / name / of_class / f"{number}.pgm").write_bytes(header + shade)

    def interrupt(self, line: str) -> list[str]:
        """Press Ctrl-C as soon as training shows progress."""
        _print(f"$ {line}")
        with subprocess.Popen(
            shlex.split(line),
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as training:
            assert training.stderr is not None
            output = ""
            for row in training.stderr:
                output += row
                if "step " in row:
                    training.send_signal(signal.SIGINT)
                    break
            output += training.stderr.read()
        assert training.returncode == STOPPED_BY_CTRL_C, output
        return _offered(output, line)

    def _call(self, words: Sequence[str]) -> str:
        answer = self._answer(words)
        return answer.stdout + answer.stderr

    def _answer(self, words: Sequence[str], code: int = 0) -> subprocess.CompletedProcess[str]:
        _print(f"$ {shlex.join(words)}")
        began = time.monotonic()
        answer = subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
        )
        assert answer.returncode == code, f"{shlex.join(words)}: {answer.stdout}{answer.stderr}"
        _print(f"  {time.monotonic() - began:.0f} s")
        return answer

    def _environment(self) -> dict[str, str]:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        programs = f"{self.folder / 'venv/bin'}{os.pathsep}{outside['PATH']}"
        return {**outside, "PATH": programs, "XDG_CACHE_HOME": str(self.folder / "cache")}


def _offered(output: str, own: str) -> list[str]:
    commands = (match[1].strip() for row in output.splitlines() for match in OFFERED.finditer(row))
    return list(dict.fromkeys(line for line in commands if line != own))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def walk(folder: Path) -> None:
    """Every path of a new user, in a folder that is empty."""
    session = UserSession(folder)
    session.install()
    _first_training(session)
    _measure_and_plan(session)
    _stop_and_resume(session)
    _write_files(session)
    _train_on_own_data(session)
    _fine_tune_and_predict(session)
    _train_a_language_model(session)
    _sweep_and_compare(session)


def _first_training(session: UserSession) -> None:
    session.run("gpipe --help")
    session.run("gpipe ls models")
    after_training = session.run("gpipe train epochs=1 run_dir=first")
    session.run_offered(after_training)
    kinds = {line.split()[1] for line in after_training}
    assert kinds >= {"train", "eval", "export"}, after_training
    session.run("gpipe report first")


def _measure_and_plan(session: UserSession) -> None:
    session.run("gpipe profile timeline=true")
    session.run_offered(session.run("gpipe balance --by time model=mlp"))
    session.run_offered(session.run("gpipe plan model=mlp plan.budget=10"))


def _stop_and_resume(session: UserSession) -> None:
    session.run_offered(session.interrupt("gpipe train model=mlp epochs=20"))


def _write_files(session: UserSession) -> None:
    session.run_offered(session.run("gpipe cp recipe/digits conf/recipes/mine.yaml"))
    session.run("gpipe cp run/first again.yaml")
    session.run("gpipe train config=again.yaml steps=2 run_dir=again")
    session.write("flat.yaml", "model: mlp\nmodel.width: 32\noptimizer: sgd\noptimizer.lr: 0.1\nsteps: 3\n")
    session.run("gpipe train config=flat.yaml chunks=2 run_dir=flat")
    session.run("gpipe train config=first/config.yaml steps=2 run_dir=copied")
    states = {run["state"] for run in session.json("gpipe runs . --json")}
    assert states == {"finished"}, states


def _train_on_own_data(session: UserSession) -> None:
    session.write_images("pictures", classes=("circle", "square", "star"), images=10)
    # 30 images with a batch norm: the last mini-batch is a short one.
    words = "data=image_folder data.path=pictures data.size=32 data.validation=0.2 batch_size=7"
    session.run(f"gpipe train {words} epochs=2 run_dir=pictured")


def _fine_tune_and_predict(session: UserSession) -> None:
    session.run("gpipe export run=first out=digits.safetensors")
    words = "data=image_folder data.path=pictures data.size=32 data.validation=0.2 batch_size=8 epochs=2"
    refused = session.refused(f"gpipe train {words} model.weights=digits.safetensors")
    assert "model.new_head=true" in refused, refused
    session.run(
        f"gpipe train {words} model.weights=digits.safetensors model.new_head=true 'freeze=[stem,layer1]' "
        "'optimizer.groups=[{match: head, lr_scale: 10}]' ema=0.9 early_stop.patience=2 eval.every=2 run_dir=tuned"
    )
    session.run("gpipe eval run=tuned which=last")
    predicted = session.json("gpipe predict run=tuned input=pictures/star --json")
    assert len(predicted["predictions"]) == 10, predicted
    session.run("gpipe export run=tuned out=tuned.safetensors")
    alone = session.json("gpipe predict weights=tuned.safetensors input=pictures/star --json")
    assert [_best(row) for row in alone["predictions"]] == [_best(row) for row in predicted["predictions"]]


def _best(prediction: dict[str, Any]) -> tuple[str, str]:
    """The likeliest class; mini-batches of another size may give other last digits."""
    return prediction["file"], prediction["classes"][0]["class"]


def _train_a_language_model(session: UserSession) -> None:
    session.run("gpipe train model=gpt steps=5 run_dir=text")
    session.run("gpipe generate run=text prompt=The tokens=5")


def _sweep_and_compare(session: UserSession) -> None:
    sweep = "gpipe train -m model=mlp optimizer.lr=0.001,0.01 steps=4 run_dir=sweep"
    session.run_offered([line for line in session.run(sweep) if line.startswith("gpipe report")])
    session.run(sweep)  # every job is finished


def main() -> None:
    walk(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="newcomer-")))


if __name__ == "__main__":
    main()
