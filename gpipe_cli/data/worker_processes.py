"""Load batches in worker processes, ahead of time and in order.

This file decides how workers start, fail and stop. It knows nothing of samples: a request goes to a worker, the worker
calls `load` with it, and the batch comes back.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_cli.errors import DataError
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.pytree import ModelInput, map_tensors

Batch = tuple[ModelInput, Tensor]
_DEFAULT_TIMEOUT = 120.0
"""Seconds that a worker may take for a mini-batch if data.timeout is not set."""


class Requests(Protocol):
    """What to load, in order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


def load_in_workers(
    load: Callable[[Any], Batch],
    requests: Requests,
    workers: int,
    timeout: float | None,
    *,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """pin_memory: a thread of this process copies each batch to pinned memory, which no worker can share."""
    seconds = timeout or _DEFAULT_TIMEOUT
    loader: DataLoader[Any] = DataLoader(
        _WorkerDataset(load),  # type: ignore[arg-type]  # has the methods of a dataset, which is all torch needs
        sampler=requests,
        batch_size=None,
        num_workers=min(workers, len(requests)),
        collate_fn=_unchanged,
        worker_init_fn=partial(_set_up_worker, os.getpid()),
        timeout=seconds,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # the loader draws a seed, by default from torch's default generator
    )
    # torch keeps its worker processes private; those that appear while the loader starts are its own.
    children_before = set(active_children())
    incoming = iter(loader)
    processes = set(active_children()) - children_before
    gate = _sigchld_gate()
    try:
        for _ in range(len(requests)):
            # Closed again at the `yield`, outside of this block, where the caller trains on the batch.
            with gate:
                _check_alive(processes)
                batch = next(incoming)
            if isinstance(batch, _Failure):
                raise DataError(batch.message) from _WorkerTraceback(batch.traceback)
            yield batch.batch
    except RuntimeError as error:  # a worker died or timed out, for which torch has no exception of its own
        _kill(processes)
        reason = str(error).partition("\n")[0]
        if "timed out" in reason:
            reason = f"no mini-batch for data.timeout={seconds:g} seconds"
        raise DataError(f"loading data in workers failed: {reason}") from _without_tracebacks(error)
    finally:
        del incoming  # the last reference: torch stops the workers with it


def pinned(batch: Batch) -> Batch:
    input, target = batch
    return map_tensors(Tensor.pin_memory, input), target.pin_memory()


def _without_tracebacks(error: BaseException) -> BaseException:
    """Drop the frames of an error and of those behind it: they would keep the loader, its threads and workers alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _check_alive(workers: Collection[BaseProcess]) -> None:
    """Raise for a worker that died between two batches; torch would notice only after the timeout."""
    for worker in workers:
        if not worker.is_alive() and worker.exitcode:
            raise RuntimeError(f"worker {worker.pid} exited with code {worker.exitcode}")


def _kill(workers: Collection[BaseProcess]) -> None:
    """Kill workers at once: torch would wait ten seconds for a stuck one."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


@final
class _SigchldGate:
    """Passes SIGCHLD on to torch's handler only while the main thread waits for a batch.

    That handler raises for a dead worker wherever the main thread is, which may be in the middle of an update.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._is_open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._handler(number, frame)

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._is_open = False


def _sigchld_gate() -> AbstractContextManager[None]:
    """Install the gate in front of the handler that torch installed with its first loader."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _SigchldGate):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return nullcontext()  # torch has no handler either: only the main thread can install one
    gate = _SigchldGate(handler)
    signal.signal(signal.SIGCHLD, gate)
    return gate


@final
@dataclass(frozen=True)
class _LoadedBatch:
    """A batch on its way from a worker. Left to itself, torch would pin a tuple of tensors as a list."""

    batch: Batch

    def pin_memory(self) -> _LoadedBatch:
        return _LoadedBatch(pinned(self.batch))


@final
@dataclass(frozen=True)
class _Failure:
    """An error that a worker returns instead of raising it: torch would turn it into many lines of text."""

    message: str
    traceback: str


@final
class _WorkerTraceback(Exception):
    """The cause of a failure, as the text of the worker's traceback, for --debug."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class _WorkerDataset:
    """What a worker takes for its dataset; an index is a request for a whole batch."""

    def __init__(self, load: Callable[[Any], Batch]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> _LoadedBatch | _Failure:
        try:
            return _LoadedBatch(self._load(request))
        except DataError as error:
            return _Failure(str(error), traceback.format_exc())


def _unchanged(batch: Any) -> Any:
    return batch


def _set_up_worker(parent: int, _worker: int) -> None:
    # Ctrl-C, a terminal that closes and many schedulers signal a whole process group. The parent decides when to stop,
    # and its workers stop with it, so a worker leaves the group and ignores the signals that may still reach it.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
