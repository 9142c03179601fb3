"""The process that imports torch once and forks the ranks of a launcher, and the launcher's end of it.

Forking is safe only while a process has one thread: a lock that another thread holds would stay locked in the child.
So the launcher, which may have trained, does not fork; it starts an interpreter that does
nothing but import, fork and wait. All user code is imported by the ranks.

The two talk over a socket pair: the server sends the process ids of the ranks, waits until the launcher has opened
them, then sends each exit code.

This is not the fork server of multiprocessing, and so not torch's elastic agent, which has no other. That one imports
from the current folder first (Python 3.11), so a random.py in a folder of data would be executed; it tells its parent
the exit code 255 of every rank when it is killed, and nothing while SIGSTOP holds it.
"""

from __future__ import annotations

import gc
import os
import select
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
MAX_MESSAGE_BYTES = 2**16
"""A message of this length has room for the process ids of all ranks."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def program(imports: str, call: str, folder: Path) -> list[str]:
    """Arguments for an interpreter that executes `imports`, forks the ranks and evaluates `call` in each of them.

    In `call`, sys.argv[1] is the folder.
    """
    return ["-c", PROGRAM.format(imports=imports, call=call), str(folder), *sys.path]


@final
class ForkServer:
    """A server and the ranks that it forks. Use it in a `with` statement, which ends all of them."""

    def __init__(self, arguments: Sequence[str], ranks: int) -> None:
        """arguments: of an interpreter that calls `fork_ranks`; see `program`."""
        self._ranks = ranks
        self._pidfds: dict[int, int] = {}
        self._socket, other = socket.socketpair(type=socket.SOCK_SEQPACKET)  # one packet for each message
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

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.kill()  # and with it ranks whose process ids it has not sent yet
        self._process.wait()
        for pidfd in self._pidfds.values():
            select.select([pidfd], [], [])  # until it has ended
            os.close(pidfd)
        self._socket.close()

    def process_ids(self) -> Mapping[int, int]:
        """Wait until all ranks have started; their process ids by rank."""
        ids = dict(enumerate(self._receive()))
        # A pidfd stays with its process, while the kernel may give the number of a dead process to another.
        for rank, process_id in ids.items():
            with suppress(ProcessLookupError):  # its server was killed, and it with its server
                self._pidfds[rank] = os.pidfd_open(process_id)
        self._socket.shutdown(socket.SHUT_WR)  # now the server may reap them
        return ids

    def exit_codes(self, seconds: float) -> Mapping[int, int]:
        """Wait so long for ranks to end; the exit codes of those that have, for a signal its negative number."""
        # SIGSTOP may hold the server, which only waits for its ranks: they do not notice if it goes on.
        self._process.send_signal(signal.SIGCONT)
        codes: dict[int, int] = {}
        while self._ranks and select.select([self._socket], [], [], 0 if codes else seconds)[0]:
            rank, code = self._receive()
            codes[rank] = code
            self._ranks -= 1
        return codes

    def send_signal(self, number: int) -> None:
        """Send a signal to all ranks that have not ended."""
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def _receive(self) -> list[int]:
        """The next message of the server; PeerError if it has ended."""
        if message := self._socket.recv(MAX_MESSAGE_BYTES):
            return [int(word) for word in message.split()]
        code = self._process.wait()
        how = killed_by(-code) if code < 0 else f"ended with exit code {code}"
        raise PeerError(f"the process that starts the ranks {how}")


def killed_by(number: int) -> str:
    """How a process ended that a signal killed, for messages."""
    hint = ", perhaps because memory ran out" if number == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(number).name}{hint}"


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
        launcher.send(" ".join(map(str, ranks)).encode())
        # Returns when the launcher has opened them; until then, no other process gets their ids.
        launcher.recv(1)
        while ranks:
            child, status = os.wait()
            if child in ranks:
                launcher.send(f"{ranks.pop(child)} {os.waitstatus_to_exitcode(status)}".encode())
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
