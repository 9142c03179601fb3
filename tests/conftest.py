"""Set-up for all tests: quiet threads, and fixtures that run a command line in an empty folder."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where this is set, every process that a test starts compiles all modules of gpipe that it imports: half a second each.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
# OpenMP reads this when torch loads it. Its threads spin while they wait, and where other tests keep all cores busy
# they take the core from the very threads they wait for: a test then takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Some virtual machines announce AMX but refuse its instructions. oneDNN reads this at the first bfloat16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from hypothesis import settings

from gpipe_cli.cli import main
from tests.accelerator import simulator
from tests.support.command_line import Answer, Gpipe, UserModule
from tests.support.trained_runs import TrainedRun, copy_run, trained_once
from tests.support.user_models import HUGE, TINY, TINY_RUN, TINY_TRAINING

# No deadlines, because timing must not fail a test, and the same examples in every run. To search for new ones, run
# `pytest --hypothesis-profile=default`.
settings.register_profile("gpipe", deadline=None, derandomize=True)
settings.load_profile("gpipe")
# A shell starts background jobs with these signals ignored, and processes that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# tests/accelerator/test_on_simulated_devices.py starts pytest with this variable. Autograd starts a thread per device
# at the first backward, so the devices must exist before it.
if build := os.environ.get("GPIPE_TESTS_SIMULATE"):
    simulator.load(build)


def pytest_collection_finish() -> None:
    """Leave what torch and the test modules allocated out of garbage collections: each would take half a second."""
    gc.freeze()


@pytest.fixture(autouse=True)
def one_intra_op_thread() -> Iterator[None]:
    """Tests use small tensors, and a command changes the number of threads of the whole process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def accelerators_are_hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see a machine without accelerators unless they are marked, in this process and in those they start."""
    if request.node.get_closest_marker("accelerator") is None:
        for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
            monkeypatch.setenv(variable, "")
        monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "*:cpu")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)


@pytest.fixture
def accelerators(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """All accelerators, for tests marked `accelerator`. Where they are simulated, the test must be free of races."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        pytest.skip("this machine has no accelerator")
    simulated = simulator.loaded()
    if simulated is not None:
        simulated.reset()
    yield [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    if simulated is not None:
        assert simulated.races() == []


@pytest.fixture
def simulated(accelerators: list[torch.device]) -> simulator.Simulator:
    """The simulated accelerator, for tests that ask it about races, host synchronizations or memory limits."""
    found = simulator.loaded()
    if found is None:
        pytest.skip("only the simulated accelerator can tell")
    return found


@pytest.fixture
def gpipe(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Gpipe:
    """Run a command line in this process, in an empty folder, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # `allow` adds the current folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

    def run(*words: str) -> Answer:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def tiny(gpipe: Gpipe, tmp_path: Path) -> Gpipe:
    """gpipe, with a tiny model in the current folder and the words that train it; later words win."""
    (tmp_path / "tiny_for_tests.py").write_text(TINY, encoding="utf-8")

    def run(command: str, *words: str) -> Answer:
        given = {word.partition("=")[0] for word in words}
        base = {"train": TINY_TRAINING, "profile": TINY_RUN, "balance": TINY_RUN}.get(command, ())
        return gpipe(command, *(word for word in base if word.partition("=")[0] not in given), *words)

    return run


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this worker keeps the runs that tests copy."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def trained_run(gpipe: Gpipe, tmp_path: Path, trained_runs: Path) -> TrainedRun:
    """Copy a run of tests/support/trained_runs.py to ./run; the first test that asks for it trains it."""
    return lambda name: copy_run(trained_once(name, trained_runs / name), tmp_path)


@pytest.fixture
def tiny_run(tiny: Gpipe, trained_run: TrainedRun) -> Path:
    """A finished run of `tiny` in ./run: six steps, with the snapshot of the last one."""
    return trained_run("tiny")


@pytest.fixture
def huge(gpipe: Gpipe, tmp_path: Path) -> Gpipe:
    """A model of 100 GB in the current folder, and the words that name it."""
    (tmp_path / "huge_for_tests.py").write_text(HUGE, encoding="utf-8")
    words = ("model._target_=huge_for_tests.build", "allow=[huge_for_tests]", "data=synthetic")
    return lambda command, *more: gpipe(command, *words, "data.shape=[3,8,8]", "data.length=64", *more)


@pytest.fixture
def user_module(tmp_path: Path) -> Iterator[UserModule]:
    """Write a module into the current folder. Other tests may write one of the same name: none is left imported."""
    names: list[str] = []

    def write(name: str, text: str) -> Path:
        names.append(name)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return path

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
