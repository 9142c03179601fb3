"""Batches fetched by processes of their own, ahead of time and in order.

Decides how workers start, fail and end. It knows nothing of samples: what is wanted goes to a worker, the
function that fetches runs there, and the batch comes back.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_cli.errors import DataError

Batch = tuple[Tensor, Tensor]


def fetched_by_workers(
    fetch: Callable[[Any], Batch], wanted: list[Any], workers: int, timeout: float
) -> Generator[Batch, None, None]:
    loader: DataLoader[Any] = DataLoader(
        _WorkerSide(fetch),  # type: ignore[arg-type]  # a dataset by its methods, which is all torch asks for
        sampler=wanted,
        batch_size=None,
        num_workers=min(workers, len(wanted)),
        collate_fn=_as_it_is,
        worker_init_fn=_leave_signals_to_the_parent,
        timeout=timeout,
        generator=torch.Generator(),  # the loader draws a seed, by default from torch's default generator
    )
    others = set(active_children())
    incoming = iter(loader)
    ours = set(active_children()) - others
    try:
        for _ in wanted:
            yield _unpacked(next(incoming))
    except RuntimeError as error:  # a worker was killed or took too long; torch has no type of its own for it
        _kill(ours)
        reason = str(error).partition("\n")[0]
        if "timed out" in reason:
            reason = f"no mini-batch for data.timeout={timeout:g} seconds"
        # Without its traceback, whose frames would keep the loader and its workers alive.
        raise DataError(f"loading data in workers failed: {reason}") from error.with_traceback(None)
    finally:
        del incoming  # the last reference: torch ends the workers with it


def _kill(workers: Collection[BaseProcess]) -> None:
    """End them without asking: torch would give a stuck one ten seconds.

    It notices a dead worker by raising in the main thread, wherever that is; but only once, so the second try counts.
    """
    for _ in range(2):
        with suppress(RuntimeError):
            for one in workers:
                one.kill()
            for one in workers:
                one.join()


@final
@dataclass(frozen=True)
class _Failure:
    """An error on its way from a worker: torch would make a text of many lines of it."""

    message: str
    trace: str


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
        failure = DataError(batch.message)
        failure.add_note(f"In a data worker:\n{batch.trace}")
        raise failure
    return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_parent(_worker: int) -> None:
    # Ctrl-C, a terminal that closes and many schedulers signal a whole group of processes. The parent decides when
    # to stop, and its workers end with it: they leave the group, and ignore what does not end them by itself.
    os.setsid()
    for one in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
