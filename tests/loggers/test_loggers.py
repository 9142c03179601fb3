"""The loggers against stand-ins for their packages, which are large or need a network; and without them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpipe_cli.errors import RunError
from gpipe_cli.loggers import mlflow, tensorboard, wandb
from gpipe_cli.loggers.protocol import Logged, flat


class Recorder:
    """Answers to every name and remembers how it was called."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers or {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            self.calls.append((name, words, named))
            return self._answers.get(name, self)

        return call


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, recorder: Recorder) -> Recorder:
    module = ModuleType(name)
    module.__getattr__ = recorder.__getattr__  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


def run(tmp_path: Path, step: int = 0) -> Logged:
    return Logged(tmp_path, "resnet18 now", {"chunks": 4, "model": {"width": [1, 2]}}, step)


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("wandb", lambda: wandb.build("gpipe")),
        ("mlflow", lambda: mlflow.build("gpipe")),
        ("tensorboard", tensorboard.build),
    ],
)
def test_nothing_is_asked_of_a_logger_that_was_never_opened(
    package: str, build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = pretend(monkeypatch, package, Recorder())
    pretend(monkeypatch, "torch.utils.tensorboard", recorder)
    build().close()
    assert recorder.calls == []


def test_a_logger_writes_to_no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = pretend(monkeypatch, "tensorboard", Recorder())
    pretend(monkeypatch, "torch.utils.tensorboard", recorder)
    pretend(monkeypatch, "wandb", recorder)
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


def test_tensorboard_gets_scalars_and_hides_a_future_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    for name in ("tensorboard", "torch.utils.tensorboard"):
        pretend(monkeypatch, name, recorder)
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


def test_a_run_that_goes_on_is_the_same_run_for_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = pretend(monkeypatch, "wandb", Recorder())
    for _ in range(2):
        logger = wandb.build("gpipe", "offline")
        logger.open(run(tmp_path))
        logger.write(3, {"eval/loss": 0.5})
        logger.close()
    first, second = (named for name, _, named in recorder.calls if name == "init")
    assert first["id"] == second["id"] and (first["mode"], first["resume"]) == ("offline", "allow")
    assert ("log", ({"step": 3, "eval/loss": 0.5},), {}) in recorder.calls
    assert recorder.calls[-1][0] == "finish"


@pytest.mark.parametrize("kept", ["", "[]", '{"wandb": "../../x"}', '{"wandb": 3}'])
def test_an_identity_that_is_none_is_not_used(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = pretend(monkeypatch, "wandb", Recorder())
    (tmp_path / "logger.json").write_text(kept, encoding="utf-8")
    wandb.build("gpipe").open(run(tmp_path))
    assert len(recorder.calls[0][2]["id"]) == 16


def test_a_run_that_goes_on_is_the_same_run_for_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = SimpleNamespace(info=SimpleNamespace(run_id="abc123"))
    recorder = pretend(monkeypatch, "mlflow", Recorder({"start_run": begun}))
    for _ in range(2):
        logger = mlflow.build("gpipe", "file:somewhere")
        logger.open(run(tmp_path))
        logger.write(3, {"eval/loss": 0.5})
        logger.close()
    started = [named for name, _, named in recorder.calls if name == "start_run"]
    assert started == [{"run_id": None, "run_name": "resnet18 now"}, {"run_id": "abc123", "run_name": None}]
    parameters = [words for name, words, _ in recorder.calls if name == "log_params"]
    assert parameters == [({"chunks": "4", "model.width": "[1, 2]"},)]
    assert ("log_metrics", ({"eval/loss": 0.5},), {"step": 3}) in recorder.calls


def test_nested_settings_are_named_by_their_path() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "d": None}
