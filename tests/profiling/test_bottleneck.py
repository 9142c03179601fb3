from __future__ import annotations

import pytest

from gpipe_cli.profiling.bottleneck import verdict
from gpipe_cli.profiling.timeline import PartitionTime
from gpipe_cli.schedule.pipeline_spec import PipelineSpec


def times(*busy: float, recompute: float = 0.0) -> list[PartitionTime]:
    return [PartitionTime(one, recompute, 1 - one, 0.0) for one in busy]


@pytest.mark.parametrize(
    ("partitions", "spec", "bubble", "ideal", "advice"),
    [
        (times(0.9, 0.9), PipelineSpec("gpipe", 2, 8), 0.1, 0.1, ["nothing stands out"]),
        (times(0.5, 0.9), PipelineSpec("gpipe", 2, 8), 0.1, 0.1, ["balance=time"]),
        (times(0.8, 0.8), PipelineSpec("gpipe", 2, 4), 0.2, 0.2, ["chunks=8", "schedule=zero_bubble"]),
        (times(0.8, 0.8), PipelineSpec("zero_bubble", 2, 64), 0.2, 0.2, ["nothing stands out"]),
        (times(0.6, 0.6), PipelineSpec("gpipe", 2, 8, cores=2), 0.4, 0.1, ["fewer chunks"]),
        (times(0.6, 0.6, 0.6), PipelineSpec("gpipe", 3, 8, cores=2), 0.4, 0.1, ["partitions=2"]),
        (times(0.9, 0.9, recompute=0.2), PipelineSpec("gpipe", 2, 8), 0.1, 0.1, ["checkpoint=never"]),
    ],
)
def test_what_to_try_follows_from_what_was_measured(
    partitions: list[PartitionTime], spec: PipelineSpec, bubble: float, ideal: float, advice: list[str]
) -> None:
    found = verdict(partitions, spec, bubble=bubble, ideal_bubble=ideal, rows=64)
    assert len(found.advice) == len(advice)
    assert all(given.startswith(start) for given, start in zip(found.advice, advice, strict=True))


def test_the_bottleneck_is_the_partition_that_is_busy_longest() -> None:
    found = verdict(times(0.5, 0.8, 0.7), PipelineSpec("gpipe", 3, 8), bubble=0.1, ideal_bubble=0.1, rows=64)
    assert found.bottleneck == 1
