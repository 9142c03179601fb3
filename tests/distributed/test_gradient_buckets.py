"""Gradients are summed in buckets, in one order, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import HashStore
from torch.utils.checkpoint import checkpoint

from gpipe_cli.distributed import get_group, gradient_buckets, setup_process_groups
from gpipe_cli.distributed.gradient_buckets import Bucket, GradientBuckets, make_buckets
from gpipe_cli.engines import processes
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.launch.rank_setup import LOST_PEER_MESSAGES
from gpipe_cli.losses.cross_entropy import CrossEntropy
from gpipe_cli.pipeline.context import current_microbatch
from tests.support.forked_ranks import run_ranks


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bucket]]:
    """A group of this process alone, and buckets of 40 bytes; the buckets that were started."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 40)
    buckets: list[Bucket] = []
    start = Bucket.start

    def recorded(bucket: Bucket, *arguments: Any) -> None:
        buckets.append(bucket)
        start(bucket, *arguments)

    monkeypatch.setattr(Bucket, "start", recorded)
    yield buckets
    distributed.destroy_process_group()


def group() -> Any:
    return distributed.group.WORLD


def sizes(buckets: list[Bucket]) -> list[list[int]]:
    return [[parameter.numel() for parameter in bucket.parameters] for bucket in buckets]


def test_a_bucket_has_consecutive_parameters_of_one_dtype_up_to_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 40)
    single, double = torch.float32, torch.float64
    parameters = [
        torch.empty(size, dtype=dtype)
        for size, dtype in [(4, single), (2, double), (6, single), (1, single), (99, single), (2, single)]
    ]
    assert sizes(make_buckets(parameters)) == [[4, 6], [1], [99], [2], [2]]
    assert make_buckets([]) == []


class Watched(nn.Linear):
    """Notes how many buckets were started when its backward ran."""

    def __init__(self, started: list[Bucket]) -> None:
        super().__init__(3, 3)
        self.buckets_before: list[int] = []
        self._started = started

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        output.register_hook(lambda gradient: self.buckets_before.append(len(self._started)))
        return output


def test_a_bucket_is_summed_while_the_layers_before_it_still_run_their_backward(
    started: list[Bucket],
) -> None:
    layers = [Watched(started) for _ in range(3)]
    model = nn.Sequential(*layers)
    buckets = GradientBuckets(list(model.parameters()), group())
    for _ in range(2):
        model.zero_grad()
        started.clear()
        buckets.begin()
        model(torch.ones(1, 3)).sum().backward()  # of a micro-batch that is not the last
        assert not started
        with buckets.last_backward():
            model(torch.ones(1, 3)).sum().backward()
        assert [layer.buckets_before.pop() for layer in layers] == [4, 2, 0]
        assert sizes(started) == [[3], [9]] * 3
        assert all(parameter.grad is None for parameter in model.parameters())
        buckets.finish()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            assert gradient is not None and parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad)


def test_a_bucket_that_is_complete_before_its_turn_waits_and_what_none_has_stays_none(
    started: list[Bucket],
) -> None:
    first, unused, tied, last = (nn.Parameter(torch.ones(10)) for _ in range(4))
    buckets = GradientBuckets([first, tied, unused, last], group(), late=[tied])
    buckets.begin()
    with buckets.last_backward():
        (first * tied * last).sum().backward()
    assert [bucket.parameters for bucket in started] == [[last]]
    buckets.finish()
    assert [bucket.parameters for bucket in started] == [[last], [unused], [first], [tied]]
    assert unused.grad is None
    assert all(torch.equal(parameter.grad, torch.ones(10)) for parameter in (first, tied, last))  # type: ignore[arg-type]


def test_a_gradient_that_comes_after_its_bucket_was_started_is_an_error(started: list[Bucket]) -> None:
    """Reentrant checkpointing runs a backward of its own for each use of a parameter."""
    layer = nn.Linear(3, 3, bias=False)
    buckets = GradientBuckets([layer.weight], group())
    buckets.begin()
    with buckets.last_backward():
        hidden = checkpoint(layer, torch.ones(1, 3, requires_grad=True), use_reentrant=True)
        checkpoint(layer, hidden, use_reentrant=True).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \[3, 3\] got a second gradient .* use_reentrant=False"):
        buckets.finish()


class FailsInTheLastBackward(nn.Linear):
    """In the second replica, in the backward of the second micro-batch."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        micro_batch = current_microbatch()
        if micro_batch is not None and micro_batch.index == 1 and distributed.get_rank(get_group("data")):
            output.register_hook(self._fail)
        return output

    def _fail(self, gradient: Tensor) -> None:
        raise ZeroDivisionError("no reason")


def fail_in_one_replica(rank: int, ranks: int, folder: Path) -> None:
    gradient_buckets.BUCKET_BYTES = 40
    setup_process_groups([("data", ranks), ("pipe", 1)])
    loss = CrossEntropy()
    spec = EngineSpec(
        nn.Sequential(FailsInTheLastBackward(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)),
        TrainingObjective(loss, loss.measure, partial(torch.optim.SGD, lr=0.1)),
        [3],
        [torch.device("cpu")],
        chunks=2,
        eval_chunks=2,
    )
    try:
        processes.build(spec).train_step((torch.randn(4, 3), torch.randint(3, (4,))), key=0, lr=0.1)
    except Exception as error:  # noqa: BLE001 - the test checks which error it is
        (folder / f"rank-{rank}").write_text(f"{type(error).__name__}: {error}")


def test_replicas_end_where_one_fails_while_sums_are_under_way(tmp_path: Path) -> None:
    run_ranks(fail_in_one_replica, 3, tmp_path, seconds=60)
    assert (
        (tmp_path / "rank-1").read_text()
        == (tmp_path / "rank-2").read_text()
        == "ZeroDivisionError: no reason"
    )
    lost = (tmp_path / "rank-0").read_text()
    assert any(message in lost for message in LOST_PEER_MESSAGES), lost
