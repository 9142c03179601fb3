"""The caller's modes and saved-tensor hooks, in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_cli.torch_internals.dispatch_modes import CallerModes, current_saved_tensors_hooks


class Dispatches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self, log: list[Functions] | None = None) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.log = [] if log is None else log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.__name__)
        self.log.append(self)
        return func(*args, **(kwargs or {}))


def in_another_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_without_modes_there_is_nothing_to_carry() -> None:
    assert CallerModes.capture() is None


def test_the_default_device_is_no_mode_of_the_users() -> None:
    with torch.device("meta"):
        assert CallerModes.capture() is None


def test_the_callers_modes_see_what_another_thread_does_and_only_while_entered() -> None:
    dispatches, functions = Dispatches(), Functions()
    with dispatches, functions:
        modes = CallerModes.capture()
    assert modes is not None

    def work() -> None:
        with modes.entered():
            torch.ones(2).sin()
        torch.ones(2).cos()
        assert CallerModes.capture() is None

    in_another_thread(work)
    assert "sin" in dispatches.calls and "cos" not in dispatches.calls
    assert functions.calls == ["ones", "sin"]


def test_modes_keep_their_order() -> None:
    log: list[Functions] = []
    outer, inner = Functions(log), Functions(log)
    tensor = torch.ones(2)
    with outer, inner:
        modes = CallerModes.capture()
        tensor.sin()
    assert modes is not None
    here = [mode is inner for mode in log]
    log.clear()

    def work() -> None:
        with modes.entered():
            tensor.sin()

    in_another_thread(work)
    assert [mode is inner for mode in log] == here == [True, False]


def test_the_flop_counter_counts_the_operators_of_all_threads() -> None:
    weight = torch.ones(8, 8)
    with FlopCounterMode(display=False) as counter:
        modes = CallerModes.capture()
        assert modes is not None

        def work() -> None:
            with modes.entered():
                weight @ weight

        in_another_thread(work)
        in_another_thread(work)
    assert counter.get_total_flops() == 2 * 2 * 8**3


def test_an_error_in_another_thread_leaves_its_stacks_empty_and_the_next_turn_free() -> None:
    with Dispatches(), Functions():
        modes = CallerModes.capture()
    assert modes is not None

    def work() -> None:
        with pytest.raises(ZeroDivisionError), modes.entered():
            raise ZeroDivisionError
        assert CallerModes.capture() is None

    in_another_thread(work)
    in_another_thread(work)


def test_the_innermost_hooks_on_saved_tensors_are_found() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert current_saved_tensors_hooks() is None
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert current_saved_tensors_hooks() == (pack, unpack)
    assert current_saved_tensors_hooks() is None
