"""Batches fetched by processes of their own, ahead of time and in order.

Decides how workers start, fail and end. It knows nothing of samples: what is wanted goes to a worker, the
function that fetches runs there, and the batch comes back.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_cli.errors import DataError
from gpipe_cli.orphans import end_with

Batch = tuple[Tensor, Tensor]
_PATIENCE = 120.0
"""Seconds a worker may take for a mini-batch where none are given."""


def fetched_by_workers(
    fetch: Callable[[Any], Batch], wanted: list[Any], workers: int, timeout: float | None
) -> Generator[Batch, None, None]:
    patience = timeout or _PATIENCE
    loader: DataLoader[Any] = DataLoader(
        _WorkerSide(fetch),  # type: ignore[arg-type]  # a dataset by its methods, which is all torch asks for
        sampler=wanted,
        batch_size=None,
        num_workers=min(workers, len(wanted)),
        collate_fn=_as_it_is,
        worker_init_fn=partial(_belong_to, os.getpid()),
        timeout=patience,
        generator=torch.Generator(),  # the loader draws a seed, by default from torch's default generator
    )
    others = set(active_children())
    incoming = iter(loader)
    ours = set(active_children()) - others
    gate = _gate()
    try:
        for _ in wanted:
            with gate:
                _check_alive(ours)
                batch = next(incoming)
            yield _unpacked(batch)
    except RuntimeError as error:  # a worker was killed or took too long; torch has no type of its own for it
        _kill(ours)
        reason = str(error).partition("\n")[0]
        if "timed out" in reason:
            reason = f"no mini-batch for data.timeout={patience:g} seconds"
        # Without its traceback, whose frames would keep the loader and its workers alive.
        raise DataError(f"loading data in workers failed: {reason}") from error.with_traceback(None)
    finally:
        del incoming  # the last reference: torch ends the workers with it


def _check_alive(workers: Collection[BaseProcess]) -> None:
    """A worker that died while nobody waited for it would be missed only when the time is up."""
    for one in workers:
        if not one.is_alive() and one.exitcode:
            raise RuntimeError(f"worker {one.pid} ended with {one.exitcode}")


def _kill(workers: Collection[BaseProcess]) -> None:
    """End them without asking: torch would give a stuck one ten seconds."""
    for one in workers:
        one.kill()
    for one in workers:
        one.join()


@final
class _Gate:
    """torch's handler of SIGCHLD, let through only while a batch is waited for.

    It raises for a dead worker wherever the main thread is, be it in the middle of an update.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._handler(number, frame)

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *_: object) -> None:
        self._open = False


def _gate() -> AbstractContextManager[None]:
    """The gate, put up before the handler that torch has installed with its first loader."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Gate):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return nullcontext()  # torch does not listen either
    gate = _Gate(handler)
    signal.signal(signal.SIGCHLD, gate)
    return gate


@final
@dataclass(frozen=True)
class _Failure:
    """An error on its way from a worker: torch would make a text of many lines of it."""

    message: str
    trace: str


@final
class _InWorker(Exception):
    """The cause of a failure, as the text it was in the worker: for --debug."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class _WorkerSide:
    """What a worker sees as its dataset: here an index is a whole batch that is wanted."""

    def __init__(self, fetch: Callable[[Any], Batch]) -> None:
        self._fetch = fetch

    def __getitem__(self, wanted: Any) -> Batch | _Failure:
        try:
            return self._fetch(wanted)
        except DataError as error:
            return _Failure(str(error), traceback.format_exc())


def _unpacked(batch: Batch | _Failure) -> Batch:
    if isinstance(batch, _Failure):
        raise DataError(batch.message) from _InWorker(batch.trace)
    return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _belong_to(parent: int, _worker: int) -> None:
    _leave_signals_to_the_parent()
    end_with(parent)


def _leave_signals_to_the_parent() -> None:
    # Ctrl-C, a terminal that closes and many schedulers signal a whole group of processes. The parent decides when
    # to stop, and its workers end with it: they leave the group, and ignore what does not end them by itself.
    os.setsid()
    for one in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
