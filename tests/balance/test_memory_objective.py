from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult, solve_within
from gpipe_cli.balance.solver import Additive, sums
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.records import LayerMemory, SkipStats
from gpipe_cli.schedule.spec import PipelineSpec

layers = st.lists(
    st.builds(
        LayerMemory,
        resident=st.integers(0, 50).map(lambda bytes: {-1: 7, bytes: bytes}),  # -1: tied to all others
        input=st.integers(0, 60),
        # Few numbers, so that layers share storages; a storage has one size.
        saved=st.sets(st.integers(0, 6)).map(
            lambda storages: {storages: 5 * storages for storages in storages}
        ),
    ),
    min_size=1,
    max_size=8,
)


def balances(count: int, partitions: int) -> list[list[int]]:
    cuts = combinations(range(1, count), partitions - 1)
    return [[end - begin for begin, end in pairwise((0, *cut, count))] for cut in cuts]


@given(
    layers,
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    st.sampled_from(["always", "except_last", "never"]),
    st.data(),
)
def test_no_balance_needs_less_and_none_that_fits_is_quicker(
    made: list[LayerMemory], partitions: int, chunks: int, schedule: str, checkpoint: str, data: st.DataObject
) -> None:
    """Against all balances there are: the bytes depend on a partition's place and on where it is cut."""
    partitions = min(partitions, len(made))
    spec = PipelineSpec(schedule, partitions, chunks, checkpoint)
    memory = MemoryObjective(made, spec)
    every = balances(len(made), partitions)
    needs = {tuple(balance): max(sums(memory, balance)) for balance in every}
    smallest = min(needs.values())
    solution = solve_within(memory, partitions)
    assert solution.largest == needs[tuple(solution.balance)] == smallest

    limit = data.draw(st.integers(0, int(2 * smallest) + 1))
    limited = MemoryObjective(made, spec, limit)
    milliseconds = data.draw(st.lists(st.integers(0, 9), min_size=len(made), max_size=len(made)))
    if limit < smallest:
        with pytest.raises(ConfigError, match="the smallest limit that works is"):
            solve_within(Additive(milliseconds), partitions, limited)
        return
    quickest = min(
        max(sums(Additive(milliseconds), balance)) for balance in every if needs[tuple(balance)] <= limit
    )
    balanced = BalanceResult.by(milliseconds, partitions, "ms", limited)
    assert limited.fits(balanced.layers)
    assert balanced.largest == balanced.lower_bound == quickest


def test_a_partition_needs_what_is_always_there_and_what_its_live_micro_batches_keep() -> None:
    made = [
        LayerMemory({0: 1000}, input=10, saved={1: 100, 2: 7}),
        LayerMemory({1: 2000}, input=20, saved={2: 7, 3: 50}),
    ]
    one_each = MemoryObjective(made, PipelineSpec("1f1b", 2, 4))
    assert sums(one_each, [1, 1]) == [1000 + 2 * 107, 2000 + 57]
    assert one_each.costs == [1107, 2057]
    together = MemoryObjective(made, PipelineSpec("gpipe", 1, 4))
    assert sums(together, [2]) == [3000 + 4 * 157], "storage 2 is one, though both layers keep it"
    recomputed = MemoryObjective(made, PipelineSpec("gpipe", 2, 4, checkpoint="always"))
    assert sums(recomputed, [1, 1]) == [1000 + 4 * 10 + 107, 2000 + 4 * 20 + 57]


def test_tied_parameters_are_there_once_in_each_partition() -> None:
    made = [LayerMemory({7: 1000}, input=0, saved={})] * 2
    assert sums(MemoryObjective(made, PipelineSpec("gpipe", 2, 1)), [1, 1]) == [1000, 1000]
    assert sums(MemoryObjective(made, PipelineSpec("gpipe", 1, 1)), [2]) == [1000]


def test_a_skip_is_kept_where_it_arrives_and_not_where_it_passes_by() -> None:
    made = [LayerMemory({}, input=1, saved={}) for _ in range(4)]
    spec = PipelineSpec("gpipe", 3, 2, checkpoint="always")
    memory = MemoryObjective(made, spec, skips=[SkipStats(0, 3, (), 100)])
    assert sums(memory, [1, 1, 2]) == [2, 2, 2 * 101]


def test_partitions_that_share_a_device_share_its_limit() -> None:
    made = [LayerMemory({index: 100}, input=0, saved={}) for index in range(4)]
    spec = PipelineSpec("interleaved", 4, 2, devices=2)
    assert MemoryObjective(made, spec, limit=200).fits([1, 1, 1, 1])
    assert not MemoryObjective(made, spec, limit=199).fits([1, 1, 1, 1])


def test_a_refusal_names_what_is_needed_and_the_balance_that_needs_least() -> None:
    made = [LayerMemory({index: 2**20}, input=0, saved={}) for index in range(3)]
    memory = MemoryObjective(made, PipelineSpec("gpipe", 2, 1), limit=2**20)
    paste = r"the smallest limit that works is 2MiB, with balance=manual 'balance.layers=\[\d,\d\]'"
    with pytest.raises(ConfigError, match=rf"device_memory=1MiB: no balance of 2 partitions .*{paste}"):
        BalanceResult.by([1, 1, 1], 2, "layers", memory)
    assert "balance [1, 2] needs 2MiB" in str(memory.refusal([1, 2]))
