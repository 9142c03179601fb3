from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpipe_cli.check.row import ERROR_HINT, MEMORY_HINT, Check, Machine, Row, Verdict, run_check, worst

MACHINE = Machine.of([torch.device("cpu")])


def test_an_error_becomes_a_row_of_one_line_after_those_before_it() -> None:
    def check(machine: Machine) -> Iterator[Row]:
        yield Row("first", Verdict.OK, "fine")
        raise RuntimeError("driver\nversion is \x1b[31minsufficient")

    first, second = run_check("links", check, MACHINE)
    assert first.name == "first"
    assert second == Row(
        "links", Verdict.PROBLEM, "RuntimeError: driver version is [31minsufficient", to_do=ERROR_HINT
    )


def test_memory_that_runs_out_is_a_row_with_its_own_hint() -> None:
    def check(machine: Machine) -> Iterator[Row]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has ...")
        yield

    (row,) = run_check("bits", check, MACHINE)
    assert row.verdict is Verdict.PROBLEM and row.to_do == MEMORY_HINT
    assert "out of memory" in row.result and "64.00 MiB" in row.result and MEMORY_HINT not in row.result


def test_the_traceback_of_an_error_is_shown_on_request_and_ctrl_c_is_no_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_with(error: BaseException) -> Check:
        def check(machine: Machine) -> Iterator[Row]:
            raise error
            yield

        return check

    assert len(list(run_check("bits", fails_with(ZeroDivisionError("here")), MACHINE, debug=True))) == 1
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        list(run_check("bits", fails_with(KeyboardInterrupt()), MACHINE))


def test_a_problem_outweighs_everything_else() -> None:
    assert worst([Verdict.OK, Verdict.PROBLEM, Verdict.NOTE, Verdict.SKIPPED]) is Verdict.PROBLEM
    assert worst([Verdict.SKIPPED, Verdict.OK]) is Verdict.OK


def test_two_workers_share_a_single_device() -> None:
    assert [str(device) for device in MACHINE.workers] == ["cpu", "cpu"]
    assert [str(device) for device in MACHINE.devices] == ["cpu"] and MACHINE.accelerators == []
    pair = Machine.of([torch.device("cuda", 0), torch.device("cuda", 1)])
    assert pair.workers == pair.devices == pair.accelerators
