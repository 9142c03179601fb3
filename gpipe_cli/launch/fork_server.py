"""The process that imports torch once and forks the ranks of a launcher, and the launcher's end of it.

Forking is safe only while a process has one thread: a lock that another thread holds would stay locked in the child.
So the launcher, which supervises in a thread and may have trained, does not fork; it starts an interpreter that does
nothing but import, fork and wait. All user code is imported by the ranks.

The two talk over a socket pair: the server sends the process ids of the ranks, waits until the launcher has opened
them, then sends each exit code.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, final

from gpipe_cli.errors import PeerError
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.report.output import print_status, secure_streams
from gpipe_cli.training.signals import install_handlers

# The server imports the same files as its launcher, because it takes over the launcher's sys.path: neither the current
# folder nor an installed package of the same name comes first.
PROGRAM = """
import sys
sys.path[:] = sys.argv[2:]
from gpipe_cli.launch.fork_server import fork_ranks, one_thread
with one_thread():
    {imports}
fork_ranks(lambda: {call})
"""
LAUNCHER = "GPIPE_LAUNCHER"
"""An environment variable: the process id of the parent, for a server also the number of its socket."""
SHUTDOWN_SECONDS = 1.0
"""How long a server has to end after its ranks."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def program(imports: str, call: str, folder: Path) -> list[str]:
    """Arguments for an interpreter that executes `imports`, forks the ranks and evaluates `call` in each of them.

    In `call`, sys.argv[1] is the folder.
    """
    return ["-c", PROGRAM.format(imports=imports, call=call), str(folder), *sys.path]


@final
class ForkServer:
    """Starts a server and its ranks. Use it in a `with` statement, which ends the server."""

    def __init__(self, arguments: Sequence[str], ranks: int) -> None:
        """arguments: of an interpreter that calls `fork_ranks`; see `program`."""
        self._ranks = ranks
        self._socket, other = socket.socketpair()
        size = str(ranks)
        environment = {
            **os.environ,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": "gpipe",  # by which torch.distributed recognizes a rank
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            LAUNCHER: f"{os.getpid()} {other.fileno()}",
        }
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], env=environment, pass_fds=[other.fileno()]
            )
        self._lines = self._socket.makefile("r", encoding="ascii")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_SECONDS)
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._socket.close()  # last: the server may still send exit codes

    def process_ids(self) -> Mapping[int, int]:
        """Wait until all ranks have started; their process ids by rank. They are valid until `exit_codes`."""
        ids = [int(word) for word in self._lines.readline().split()]
        if len(ids) < self._ranks:
            raise self._ended()
        return dict(enumerate(ids))

    def exit_codes(self) -> Mapping[int, int]:
        """Wait until all ranks have ended; their exit codes by rank, for a signal its negative number."""
        self._socket.shutdown(socket.SHUT_WR)  # now the server may reap them
        codes: dict[int, int] = {}
        for line in self._lines:
            rank, code = line.split()
            codes[int(rank)] = int(code)
        if len(codes) < self._ranks:
            raise self._ended()
        return codes

    def wake(self) -> None:
        """Continue the server if SIGSTOP holds it; it only waits for its ranks, so ranks do not notice."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the server, and with it all ranks."""
        self._process.kill()

    def _ended(self) -> PeerError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return PeerError(f"the process that starts the ranks {how}{hint}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, imports start no threads, and signals are recorded for the ranks instead of ending the process."""
    # Only the launcher decides to end at once, and a closed terminal signals the server as well as the ranks.
    install_handlers().patient = True
    # NumPy's OpenBLAS starts its threads when it is loaded. Other libraries start theirs at their first use.
    before = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    gc.disable()  # what is imported stays, and the collector would scan it again and again
    yield
    gc.freeze()  # else the first collection of each rank would copy all memory that it shares with the others
    gc.enable()
    del os.environ[BLAS_THREADS]
    if before is not None:
        os.environ[BLAS_THREADS] = before


def fork_ranks(run: Callable[[], NoReturn]) -> NoReturn:
    """Run every rank in a fork of this process, which the launcher started, and exit after the last."""
    parent, *descriptor = map(int, os.environ.pop(LAUNCHER).split())
    die_with_parent(parent)
    if not descriptor:  # this is a rank, started below
        run()
    sys.stdout.flush()
    sys.stderr.flush()
    forks = len(list(Path("/proc/self/task").iterdir())) == 1
    if not forks:
        secure_streams()
        print_status("an imported library has started threads, so every rank imports torch for itself")
    with socket.socket(fileno=descriptor[0]) as launcher:
        ranks: dict[int, int] = {}
        for rank in range(int(os.environ["WORLD_SIZE"])):
            ranks[_fork(rank, run, launcher) if forks else _start(rank)] = rank
        launcher.sendall(f"{' '.join(map(str, ranks))}\n".encode())
        launcher.recv(
            1
        )  # returns when the launcher has opened them; until then, no other process gets their ids
        while ranks:
            child, status = os.wait()
            if child in ranks:
                launcher.sendall(f"{ranks.pop(child)} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _fork(rank: int, run: Callable[[], NoReturn], launcher: socket.socket) -> int:
    server = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(server)
        launcher.close()
        os.environ.update(_rank_environment(rank))
        # Python reseeds its own generator in a fork; torch's starts from the same seed in every process.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        run()
    except BaseException:  # noqa: BLE001 - a rank never returns into the loop of its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _start(rank: int) -> int:
    """Start a rank in an interpreter of its own, which executes the same program as this process."""
    environment = {**os.environ, **_rank_environment(rank), LAUNCHER: str(os.getpid())}
    return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment).pid


def _rank_environment(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
