from __future__ import annotations

import pytest

from gpipe_cli.report.model_tables import measured_memory_rows, print_measured_memory

PARTITIONS = [
    {"device": "cuda:0", "parameter_bytes": 2**20, "gradient_bytes": 2**20, "optimizer_bytes": 2**21},
    {"device": "cuda:1"},
    {"device": "cuda:0", "parameter_bytes": 2**20, "gradient_bytes": 0, "optimizer_bytes": 0},
]


def test_partitions_that_share_a_device_share_its_peak() -> None:
    rows = measured_memory_rows(PARTITIONS, (0, 1, 0), [7 * 2**20, None])
    assert [row["device_peak_bytes"] for row in rows] == [7 * 2**20, None, 7 * 2**20]
    assert [row["estimated_bytes"] for row in rows] == [2**22, None, 2**20]


def test_measured_memory_is_shown_beside_the_estimate_where_a_device_reports_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_measured_memory(measured_memory_rows(PARTITIONS, (0, 1, 0), [7 * 2**20, None]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "cuda:0", "4.00", "MiB", "7.00", "MiB"] in lines and ["1", "cuda:1", "-", "-"] in lines
    print_measured_memory(measured_memory_rows(PARTITIONS, (0, 1, 0), [None, None]))
    assert capsys.readouterr().out == ""
