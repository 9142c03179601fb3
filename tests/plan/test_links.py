from __future__ import annotations

import pytest
import torch

from gpipe_cli.plan import links
from gpipe_cli.plan.links import Link, measure_link

CPU = torch.device("cpu")


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert Link(0.5, 1e9).ms(2_000_000) == pytest.approx(2.5)


def test_latency_is_the_time_of_a_small_copy_and_bandwidth_that_of_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {links.SMALL: 0.001, links.LARGE: 0.005}
    monkeypatch.setattr(links, "_copy_seconds", lambda size, *_: taken[size])
    link = measure_link(CPU, CPU)
    assert link.latency_ms == 1.0
    assert link.ms(links.LARGE - links.SMALL) == pytest.approx(5.0)


def test_copies_within_a_device_are_measured_too() -> None:
    link = measure_link(CPU, CPU)
    assert link.latency_ms > 0 and link.bytes_per_second > 0
