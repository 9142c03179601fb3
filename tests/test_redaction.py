from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpipe_cli import redaction
from gpipe_cli.config.schema import LogConfig
from gpipe_cli.redaction import redacted, remember


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_references", {})


def test_the_longest_value_is_replaced_first_and_numbers_stay() -> None:
    for name, value in {"A": "secret", "B": "secret-key", "C": "12345", "D": "cpu", "E": None}.items():
        remember(name, value)
    assert redacted("secret-key secret 12345 cpu") == "${oc.env:B} ${oc.env:A} 12345 cpu"


def test_no_file_of_a_run_holds_what_a_reference_stands_for(
    gpipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """overrides.yaml held the value, and so did the config.yaml of a run resumed with a new reference."""
    text = tmp_path / "hunter2.txt"
    text.write_text("to be or not to be, that is the question\n" * 40, encoding="utf-8")
    monkeypatch.setenv("GPIPE_TEXT", str(text))
    small = ("model=gpt", "model.width=8", "model.depth=1", "model.heads=1", "batch_size=4", "log.every=1")
    words = ("data=text", "data.path=${oc.env:GPIPE_TEXT}", "run_dir=run", "engine=single", *small)
    assert gpipe("train", *words, "steps=1").code == 0
    assert (
        gpipe("train", "resume=run", "steps=2", "logger._target_=gpipe_cli.loggers.protocol.NoLogger").code
        == 0
    )
    text.write_text("too short", encoding="utf-8")
    assert gpipe("train", "resume=run", "steps=3").code == 3
    holding = [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    assert not holding
    assert "${oc.env:GPIPE_TEXT}" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


def test_a_message_in_the_log_of_a_run_names_the_reference(tmp_path: Path) -> None:
    from gpipe_cli.runs.recorder import run_log
    from gpipe_cli.training.metrics import LineFile

    remember("ROOT", "/data/hunter2")
    file = LineFile(tmp_path / "train.log")
    with pytest.raises(OSError, match="hunter2"), run_log(file, LogConfig(), step=0):
        raise OSError("/data/hunter2/7.png: cannot be read")
    file.close()
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "hunter2" not in log and "${oc.env:ROOT}/7.png: cannot be read" in log
