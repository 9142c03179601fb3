"""What tests share: one intra-op thread, and for the command line a folder of their own and its answer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from gpipe_cli.cli import main

# Timing decides no test, and a suite that was green is green again; new examples are a matter of
# `pytest --hypothesis-profile=default`.
settings.register_profile("gpipe", deadline=None, derandomize=True)
settings.load_profile("gpipe")
# A shell starts what it runs in the background with these ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Some virtual machines announce AMX and then refuse its instructions; torch reads this at its first bfloat16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@dataclass(frozen=True)
class Answer:
    """What a command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def one_intra_op_thread() -> Iterator[None]:
    """Tensors are small here: more threads would only spin, and a command sets the count of the process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpipe(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Answer]:
    """Runs a command line in this process, in an empty folder, with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

    def run(*words: str) -> Answer:
        capsys.readouterr()
        code = main(list(words))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
