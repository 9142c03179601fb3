"""Which replica is responsible for which tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.distributed.replica_assignment import assign_replicas, largest_share


def test_equal_tensors_are_dealt_out_evenly() -> None:
    assert assign_replicas([4] * 6, 3) == [0, 1, 2, 0, 1, 2]


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_no_replica_gets_more_than_an_equal_share_and_one_tensor(sizes: list[int], replicas: int) -> None:
    responsible = assign_replicas(sizes, replicas)

    loads = [
        sum(size for size, owner in zip(sizes, responsible, strict=True) if owner == replica)
        for replica in range(replicas)
    ]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / replicas + max(sizes, default=0)


def test_the_largest_share_is_that_of_the_replica_with_the_most_state() -> None:
    sizes, state = [5, 4, 3, 3], [50, 40, 1, 1]
    assert assign_replicas(sizes, 2) == [0, 1, 1, 0]
    assert largest_share(sizes, state, replicas=2) == 51
    assert largest_share(sizes, state, replicas=1) == sum(state)
    assert largest_share([], [], replicas=3) == 0
