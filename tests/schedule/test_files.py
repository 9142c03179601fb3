"""Schedules as files: both forms, hostile ones, and orders from a file that a pipe runs to the same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.order_search import search_orders, v_shaped
from gpipe_cli.schedule import files, names, order, traits
from gpipe_cli.schedule.files import FixedOrder, read_schedule, schedule_text
from gpipe_cli.schedule.orders import zero_bubble_v
from gpipe_cli.schedule.simulate import PartitionCost, simulate


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("suffix", [".csv", ".txt"])
def test_an_order_survives_both_forms(tmp_path: Path, name: str, suffix: str) -> None:
    partitions = 4 if traits(name).several_per_device else 2
    made = order(name, partitions, 5, 2)
    path = tmp_path / f"order{suffix}"
    path.write_text(schedule_text(made, is_csv=suffix == ".csv"))
    schedule = read_schedule(path)
    assert schedule.given == made
    assert order(schedule, partitions, 5, 2) == made
    assert simulate(schedule.given, [PartitionCost(1, 2)] * partitions).step > 0


def test_the_readable_form_has_comments_and_torchs_form_empty_cells(tmp_path: Path) -> None:
    readable, torch_form = tmp_path / "a.txt", tmp_path / "a.csv"
    readable.write_text("# a comment\n\nF0.0 B0.0 # the end\n")
    torch_form.write_text("0F0,,0B0\n,\n")
    assert read_schedule(readable).given == read_schedule(torch_form).given == order("1f1b", 1, 1, 1)


def test_other_numbers_of_micro_batches_leave_actions_out_or_repeat_the_order() -> None:
    schedule = FixedOrder("mine", zero_bubble_v(4, 3, 2))
    for chunks in range(1, 9):
        made = order(schedule, 4, chunks, 2)
        assert sum(map(len, made)) == 3 * 4 * chunks
    with pytest.raises(ValueError, match="'mine' is for 4 partitions on 2 devices, got 6 on 2"):
        order(schedule, 6, 3, 2)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "0F0,0X0\n", "line 1: '0X0' is not an action such as 0F1"),
        ("a.txt", "F0.0\nF0.1e9\n", r"line 2: 'F0.1e9' is not an action such as F0\.1"),
        ("a.txt", "F0.9999999 B0.9999999", "is not an action"),
        ("a.txt", "# nothing\n", "has no actions"),
        ("a.txt", "F0.0 F0.1 B0.1 B0.0", r"B0\.0 comes after B0\.1, micro-batches must ascend"),
        ("a.txt", "F0.0 B0.0\nB1.0 F1.0", "the workers wait for each other"),
        ("a.csv", "0F0,0B0\n2F0,2B0\n", r"F1\.0 is missing"),
        ("a.txt", "".join(f"B{worker}.0 F{worker}.0\n" for worker in range(9)), "for B3.0; and 5 others$"),
        ("a.txt", "\n" * 5 + "F0.0 " * 3, r"F0\.0 stands in the order 3 times"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_schedule(tmp_path / name)


@pytest.mark.parametrize("space", ["", " ", "\t", "\u00a0", "\u3000", ","])
def test_lines_without_actions_are_no_workers_whatever_program_wrote_them(tmp_path: Path, space: str) -> None:
    path = tmp_path / "ORDER.CSV"
    path.write_text(f"{space}\r\n0F0,0B0\r\n{space}\r\n", encoding="utf-8-sig", newline="")
    assert read_schedule(path).given == order("1f1b", 1, 1, 1)
    with pytest.raises(ConfigError, match="worker 1 has no actions"):
        FixedOrder("mine", (*order("1f1b", 1, 1, 1), ()))


def test_a_file_with_too_many_actions_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ACTIONS", 3)
    path = tmp_path / "a.txt"
    path.write_text("F0.0 F0.1 F0.2 F0.3 nonsense")
    with pytest.raises(ConfigError, match="or 3 actions"):
        read_schedule(path)


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ConfigError, match=r"pipe\.csv: cannot be read as a schedule: .*named pipe"):
        read_schedule(tmp_path / "pipe.csv")
    with (tmp_path / "large.csv").open("wb") as file:
        file.truncate(2**26)
    with pytest.raises(ConfigError, match=r"gpipe reads at most"):
        read_schedule(tmp_path / "large.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as a schedule"):
        read_schedule(tmp_path / "binary.csv")


def _gradients(
    schedule: str | FixedOrder, balance: list[int], devices: int, rows: int
) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())]
    input, target = torch.arange(rows * 6.0).view(rows, 6) / 50, torch.ones(rows, 6)
    workers = ["cpu"] * devices
    with GPipe(
        nn.Sequential(*layers), balance, devices=workers, chunks=6, checkpoint="never", schedule=schedule
    ) as pipe:
        loss = pipe.step(input, target, nn.MSELoss(), key=3)
        return [loss, *(parameter.grad for parameter in pipe.parameters())]


@pytest.mark.parametrize("rows", [12, 4])
def test_searched_orders_there_and_back_give_the_bits_of_gpipe(rows: int) -> None:
    cost = PartitionCost(1.0, 2.5, transfer=0.1, input_grad=1.5, weight_grad=1.0, saved_bytes=10)
    expected = _gradients("gpipe", [6, 6], 2, rows)
    for workers, balance in (((0, 1), [5, 7]), (v_shaped(2), [3, 3, 3, 3])):
        problem = OrderProblem((cost,) * len(workers), workers, 6, memory=(50.0, 50.0))
        found = FixedOrder("searched", search_orders(problem, effort=3_000).order)
        assert found.TRAITS.workers == workers
        given = _gradients(found, balance, 2, rows)
        assert len(given) == len(expected)
        for one, other in zip(given, expected, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)


def test_partitions_are_on_the_devices_that_the_order_gives_them() -> None:
    schedule = FixedOrder("there and back", zero_bubble_v(4, 3, 2))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with GPipe(model, [1] * 4, devices=["cpu", "cpu"], chunks=3, schedule=schedule) as pipe:
        assert pipe.schedule == "there and back"
        assert len(pipe.partition_devices) == 4
    with pytest.raises(ValueError, match="has 4 partitions on 2 devices, but balance has 2"):
        GPipe(nn.Sequential(*model[:2]), [1, 1], devices=["cpu", "cpu"], schedule=schedule)
