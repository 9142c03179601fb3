"""Splitting and joining: no row lost, none doubled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.pipeline.microbatch import batch_size, check, gather, micro_batches, scatter


@given(rows=st.integers(0, 40), chunks=st.integers(1, 12))
def test_there_are_as_many_micro_batches_as_rows_and_chunks_allow_and_sizes_differ_by_at_most_one(
    rows: int, chunks: int
) -> None:
    pieces = micro_batches(rows, chunks)
    sizes = [piece.size for piece in pieces]
    assert len(pieces) == max(1, min(rows, chunks))
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    value = (torch.arange(rows), torch.arange(rows * 2).reshape(rows, 2))
    slices = scatter(value, len(pieces))
    assert [len(piece[0]) for piece in slices] == sizes
    for before, after in zip(value, gather(slices), strict=True):
        assert torch.equal(before, after)


def test_nine_rows_in_eight_chunks_are_eight_micro_batches_where_tensor_chunk_gives_five() -> None:
    assert [piece.size for piece in micro_batches(9, 8)] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_a_tuple_with_one_member_stays_a_tuple() -> None:
    (joined,) = gather(scatter((torch.ones(4),), 2))
    assert torch.equal(joined, torch.ones(4))


def test_tensors_of_different_length_are_refused_where_torchgpipe_lost_a_row() -> None:
    with pytest.raises(ValueError, match=r"must agree on the batch size \(sizes: \[5, 4\]\)"):
        batch_size((torch.ones(5), torch.ones(4)))


@pytest.mark.parametrize(
    ("value", "name"),
    [("hi", "str"), ((torch.ones(1), 2), "int"), (((torch.ones(1),),), "tuple"), (None, "NoneType")],
)
def test_anything_but_tensors_in_a_flat_tuple_is_refused(value: object, name: str) -> None:
    with pytest.raises(TypeError, match=f"expected Tensor, but got {name}"):
        check(value)


def test_what_has_no_batch_dimension_cannot_be_split_or_joined() -> None:
    with pytest.raises(ValueError, match="cannot be split into micro-batches"):
        batch_size(torch.tensor(1.0))
    with pytest.raises(ValueError, match="empty tuple"):
        batch_size(())
    with pytest.raises(RuntimeError, match="cannot concatenate the outputs of 2 micro-batches"):
        gather([torch.tensor(1.0), torch.tensor(2.0)])
