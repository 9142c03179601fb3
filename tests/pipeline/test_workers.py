"""Workers: started once, reused, gone with their pipe."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpipe-worker")]


def test_no_thread_runs_before_the_first_call_and_each_partition_has_its_own() -> None:
    thread_names: set[str] = set()

    class Note(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            thread_names.add(threading.current_thread().name)
            return input

    pipe = GPipe(nn.Sequential(Note(), Note(), Note()), [1, 1, 1], chunks=4)
    assert workers() == []
    for _ in range(3):
        pipe(torch.ones(4, 1))
    assert len(workers()) == 3
    assert thread_names == {"gpipe-worker-0", "gpipe-worker-1", "gpipe-worker-2"}
    pipe.close()
    pipe.close()
    assert workers() == []


def test_a_closed_pipe_starts_anew_when_it_is_used() -> None:
    with GPipe(nn.Sequential(nn.Linear(1, 1)), [1]) as pipe:
        pipe(torch.ones(1, 1))
    assert workers() == []
    pipe(torch.ones(1, 1))
    assert len(workers()) == 1
    pipe.close()


@pytest.mark.slow
def test_five_hundred_pipes_built_used_and_dropped_leave_no_thread_and_no_pipe() -> None:
    references = []
    for _ in range(500):
        pipe = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], chunks=2)
        pipe.step(torch.ones(2, 1), torch.ones(2, 1), functional.mse_loss)
        references.append(weakref.ref(pipe))
        del pipe
    gc.collect()
    for thread in workers():
        thread.join(60)
    assert workers() == []
    assert not any(reference() for reference in references)


def test_the_number_of_intra_op_threads_is_left_alone() -> None:
    before = torch.get_num_threads()
    thread_counts: list[int] = []

    class Note(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            thread_counts.append(torch.get_num_threads())
            return input

    with GPipe(nn.Sequential(Note(), Note()), [1, 1]) as pipe:
        pipe(torch.ones(1))
    assert (torch.get_num_threads(), set(thread_counts)) == (before, {before})


def test_the_callers_modes_are_re_entered_in_the_workers() -> None:
    modes: list[tuple[bool, bool, bool]] = []

    class Note(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            autocast = torch.is_autocast_enabled("cpu")
            modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast))
            return input

    with GPipe(nn.Sequential(nn.Identity(), Note()), [1, 1]) as pipe:
        pipe(torch.ones(1))
        with torch.no_grad():
            pipe(torch.ones(1))
        with torch.inference_mode(), torch.autocast("cpu"):
            pipe(torch.ones(1))
        pipe(torch.ones(1))
    assert modes == [(True, False, False), (False, False, False), (False, True, True), (True, False, False)]


def test_two_threads_may_use_one_pipe_by_turns() -> None:
    with GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2) as pipe:

        def losses() -> list[float]:
            batch = torch.ones(4, 2)
            return [pipe.step(batch, batch, functional.mse_loss, key=0).item() for _ in range(20)]

        with ThreadPoolExecutor(3) as callers:
            futures = [callers.submit(losses) for _ in range(3)]
            results = {loss for future in futures for loss in future.result(120)}
    assert len(results) == 1


@pytest.mark.slow
def test_a_process_ends_although_nobody_closed_the_pipe() -> None:
    program = (
        "import torch; from gpipe_cli import GPipe; from torch import nn\n"
        "pipe = GPipe(nn.Sequential(nn.Linear(1, 1)), [1]); pipe(torch.ones(1, 1)); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
