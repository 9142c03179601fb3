"""What ranks share with the process that forks them, and what they must not share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.launch.fork_server import ForkServer, program
from tests.launch import forked_facts

SECONDS = 60
THREADED = "import signal, threading; threading.Thread(target=signal.pause, daemon=True).start()"


def facts_of_ranks(folder: Path, imports: str) -> list[dict[str, Any]]:
    """What each of two ranks writes about itself."""
    arguments = program(
        f"import tests.launch.forked_facts; {imports}",
        "tests.launch.forked_facts.write_facts(sys.argv[1])",
        folder,
    )
    with ForkServer(arguments, 2) as server:
        ids = server.process_ids()
        codes: dict[int, int] = {}
        while len(codes) < 2:
            codes |= server.exit_codes(SECONDS)
        assert codes == {0: 0, 1: 3}
    facts = [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]
    assert [rank["process"] for rank in facts] == list(ids.values())
    return facts


def test_ranks_share_the_imports_of_their_launcher_but_not_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('a file of the current folder was executed')")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    first, second = facts_of_ranks(tmp_path, "import random, numpy.random")
    assert first["imported_by"] == second["imported_by"] == first["parent"] == second["parent"]
    assert first["random"] != second["random"] and first["numpy"] != second["numpy"]
    assert first["environment"] == {**before, **forked_facts.environment_of(0)}
    assert second["environment"]["RANK"] == second["environment"]["LOCAL_RANK"] == "1"


def test_if_an_import_starts_a_thread_each_rank_is_an_interpreter_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = facts_of_ranks(tmp_path, THREADED)
    assert [rank["imported_by"] for rank in (first, second)] == [first["process"], second["process"]]
    assert first["parent"] == second["parent"]
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["an imported library has started threads, so every rank imports torch for itself"]


def test_the_server_and_its_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    arguments = program("import signal", "signal.pause()", tmp_path)
    start = (
        "import sys; from gpipe_cli.launch.fork_server import ForkServer; "
        f"server = ForkServer({arguments!r}, 2); print(*server.process_ids().values(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as launcher:
        assert launcher.stdout is not None
        ranks = [os.pidfd_open(int(word)) for word in launcher.stdout.readline().split()]
        launcher.send_signal(signal.SIGKILL)
    for rank in ranks:  # a pidfd is readable when its process has ended
        forked_facts.wait_for(rank)
        os.close(rank)


@pytest.mark.slow
def test_a_rank_computes_with_as_many_threads_as_it_asks_for(tmp_path: Path) -> None:
    first, second = facts_of_ranks(tmp_path, "import gpipe_cli.commands.train, gpipe_cli.engines.processes")
    assert first["imported_by"] == first["parent"], "importing torch starts no thread"
    assert first["default_threads"] == forked_facts.default_threads()
    assert second["threads"] == {"1": 1, "2": 2, "3": 3}
