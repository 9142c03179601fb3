"""The loggers against stand-ins for their packages, which are large or need a network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpipe_cli.errors import RunError
from gpipe_cli.loggers import mlflow, tensorboard, wandb
from gpipe_cli.loggers.protocol import LoggedRun


class Recorder:
    """Accepts a call of any name and records its arguments."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers or {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._answers.get(name, self)

        return call


def install_fake(monkeypatch: pytest.MonkeyPatch, name: str, recorder: Recorder) -> Recorder:
    module = ModuleType(name)
    module.__getattr__ = recorder.__getattr__  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


def run(tmp_path: Path, step: int = 0) -> LoggedRun:
    return LoggedRun(tmp_path, "resnet18 now", {"chunks": 4, "model": {"width": [1, 2]}}, step)


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("wandb", lambda: wandb.build("gpipe")),
        ("mlflow", lambda: mlflow.build("gpipe")),
        ("tensorboard", tensorboard.build),
    ],
)
def test_closing_a_logger_that_was_never_opened_calls_nothing(
    package: str, build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = install_fake(monkeypatch, package, Recorder())
    install_fake(monkeypatch, "torch.utils.tensorboard", recorder)
    build().close()
    assert recorder.calls == []


def test_a_logger_writes_to_no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_fake(monkeypatch, "tensorboard", Recorder())
    install_fake(monkeypatch, "torch.utils.tensorboard", recorder)
    install_fake(monkeypatch, "wandb", recorder)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    directory = tmp_path / "run"
    directory.mkdir()
    for name in ("tensorboard", "wandb"):
        (directory / name).symlink_to(victim)
    (directory / "logger.json").symlink_to(victim / "file")
    for logger in (tensorboard.build(), wandb.build("gpipe")):
        with pytest.raises(RunError, match="is a symbolic link"):
            logger.open(run(directory))
    (directory / "wandb").unlink()
    with pytest.raises(RunError, match=r"logger.json: cannot be read: is a symbolic link"):
        wandb.build("gpipe").open(run(directory))
    assert recorder.calls == [] and (victim / "file").read_text() == "precious"


def test_tensorboard_writes_scalars_and_hides_later_steps_of_an_earlier_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    for name in ("tensorboard", "torch.utils.tensorboard"):
        install_fake(monkeypatch, name, recorder)
    logger = tensorboard.build()
    logger.open(run(tmp_path, step=7))
    logger.write(8, {"train/loss": 0.5})
    logger.close()
    assert recorder.calls == [
        ("SummaryWriter", (str(tmp_path / "tensorboard"),), {"purge_step": 8}),
        ("add_text", ("config", "    chunks: 4\n    model.width: [1, 2]"), {"global_step": 7}),
        ("add_scalar", ("train/loss", 0.5), {"global_step": 8}),
        ("close", (), {}),
    ]


def test_a_resumed_run_is_the_same_run_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_fake(monkeypatch, "wandb", Recorder())
    for _ in range(2):
        logger = wandb.build("gpipe", "offline")
        logger.open(run(tmp_path))
        logger.write(3, {"eval/loss": 0.5})
        logger.close()
    first, second = (kwargs for name, _, kwargs in recorder.calls if name == "init")
    assert first["id"] == second["id"] and (first["mode"], first["resume"]) == ("offline", "allow")
    assert ("log", ({"step": 3, "eval/loss": 0.5},), {}) in recorder.calls
    assert recorder.calls[-1][0] == "finish"


@pytest.mark.parametrize("content", ["", "[]", '{"wandb": "../../x"}', '{"wandb": 3}'])
def test_an_invalid_id_is_ignored(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_fake(monkeypatch, "wandb", Recorder())
    (tmp_path / "logger.json").write_text(content, encoding="utf-8")
    wandb.build("gpipe").open(run(tmp_path))
    assert len(recorder.calls[0][2]["id"]) == 16


def test_a_resumed_run_is_the_same_run_for_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_run = SimpleNamespace(info=SimpleNamespace(run_id="abc123"))
    recorder = install_fake(monkeypatch, "mlflow", Recorder({"start_run": started_run}))
    for _ in range(2):
        logger = mlflow.build("gpipe", "file:somewhere")
        logger.open(run(tmp_path))
        logger.write(3, {"eval/loss": 0.5})
        logger.close()
    started = [kwargs for name, _, kwargs in recorder.calls if name == "start_run"]
    assert started == [{"run_id": None, "run_name": "resnet18 now"}, {"run_id": "abc123", "run_name": None}]
    parameters = [args for name, args, _ in recorder.calls if name == "log_params"]
    assert parameters == [({"chunks": "4", "model.width": "[1, 2]"},)]
    assert ("log_metrics", ({"eval/loss": 0.5},), {"step": 3}) in recorder.calls
