"""Splitting and joining: no row lost, none doubled."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.pipeline.microbatch import Batch, NoChunk, gather, micro_batches
from gpipe_cli.pytree import flatten, unflatten


class Masked(NamedTuple):
    rows: Tensor
    mask: Tensor


def split(value: Any, count: int, what: str) -> list[Any]:
    batch = Batch(value, what)
    return [unflatten(batch.template, tensors) for tensors in batch.scatter(count)]


def joined(parts: list[Any]) -> Any:
    tensors, template = gather([flatten(part, "output") for part in parts])
    return unflatten(template, tensors)


@given(rows=st.integers(0, 40), chunks=st.integers(1, 12))
def test_there_are_as_many_micro_batches_as_rows_and_chunks_allow_and_sizes_differ_by_at_most_one(
    rows: int, chunks: int
) -> None:
    pieces = micro_batches(rows, chunks)
    sizes = [piece.size for piece in pieces]
    assert len(pieces) == max(1, min(rows, chunks))
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    value = (torch.arange(rows), {"pairs": [torch.arange(rows * 2).reshape(rows, 2)]})
    slices = split(value, len(pieces), "input")
    assert [len(piece[0]) for piece in slices] == sizes
    numbers, nested = joined(slices)
    assert torch.equal(numbers, value[0])
    assert torch.equal(nested["pairs"][0], value[1]["pairs"][0])


@given(rows=st.integers(0, 40), chunks=st.integers(1, 12))
def test_a_batch_becomes_fewer_micro_batches_rather_than_one_of_a_single_row(rows: int, chunks: int) -> None:
    before, sizes = ([piece.size for piece in micro_batches(rows, chunks, least)] for least in (1, 2))
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1
    assert rows < 2 or min(sizes) >= 2
    assert sizes == before or min(before) < 2


def test_nine_rows_in_eight_chunks_are_eight_micro_batches_where_tensor_chunk_gives_five() -> None:
    assert [piece.size for piece in micro_batches(9, 8)] == [2, 1, 1, 1, 1, 1, 1, 1]


def test_a_tuple_with_one_member_stays_a_tuple() -> None:
    (tensor,) = joined(split((torch.ones(4),), 2, "input"))
    assert torch.equal(tensor, torch.ones(4))


def test_plain_values_go_to_every_micro_batch_and_come_back_once() -> None:
    value = {"rows": torch.arange(4), "scale": 0.5, "name": "mask", "nothing": None}
    pieces = split(value, 2, "input")
    assert [(piece["scale"], piece["name"], piece["nothing"]) for piece in pieces] == [
        (0.5, "mask", None)
    ] * 2
    whole = joined(pieces)
    assert torch.equal(whole.pop("rows"), torch.arange(4))
    assert whole == {"scale": 0.5, "name": "mask", "nothing": None}


def test_no_row_is_copied() -> None:
    rows = torch.arange(6)
    for piece in split([rows, NoChunk(rows[:1])], 3, "input"):
        assert all(
            tensor.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr() for tensor in piece
        )


def test_a_tensor_marked_not_to_be_split_reaches_every_micro_batch_whole_and_without_its_mark() -> None:
    mask, scale = torch.ones(5, 5), torch.tensor(2.0)
    value = Masked(torch.arange(4), NoChunk(mask)), [NoChunk(scale)]  # type: ignore[arg-type]
    batch = Batch(value, "input")
    assert (batch.rows, sorted(batch.whole)) == (4, [1, 2])
    for masked, (factor,) in split(value, 4, "input"):
        assert type(masked) is Masked and len(masked.rows) == 1
        assert masked.mask is mask and factor is scale


def test_a_mark_counts_for_every_place_of_the_same_tensor() -> None:
    mask = torch.ones(3)
    batch = Batch((torch.arange(4), mask, NoChunk(mask)), "input")
    assert len(batch.tensors) == 2 and batch.whole == {1}


def test_only_a_tensor_can_be_marked() -> None:
    with pytest.raises(TypeError, match="NoChunk takes a Tensor, but got list"):
        NoChunk([torch.ones(1)])  # type: ignore[arg-type]


def test_tensors_of_different_length_are_refused_where_torchgpipe_lost_a_row() -> None:
    with pytest.raises(TypeError, match=r"^input\[1\] cannot be split .* has 4 rows where others have 5"):
        Batch((torch.ones(5), torch.ones(4)), "input")


def test_what_cannot_be_split_is_named_with_its_path_and_the_hint() -> None:
    value = {"image": torch.ones(3, 2), "extra": [None, Masked(torch.ones(3), torch.tensor(1.0))]}
    with pytest.raises(
        TypeError, match=r"^input\['extra'\]\[1\]\[1\] .* without dimensions\. Pass NoChunk\(tensor\)"
    ):
        Batch(value, "input")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hi", "got str as input"),
        (None, "got NoneType as input"),
        ((), "got tuple as input"),
        ((1, [None]), "got tuple as input"),
        (NoChunk(torch.ones(2)), "got NoChunk as input"),
        (object(), r"got object as input$"),
        ((torch.ones(1), {2}), r"got set as input\[1\]$"),
        ({"a": [torch.ones(1), iter(())]}, r"got tuple_iterator as input\['a'\]\[1\]$"),
    ],
)
def test_a_value_without_a_tensor_to_split_or_with_a_foreign_object_is_refused(
    value: object, problem: str
) -> None:
    with pytest.raises(TypeError, match=f"expected Tensor, but {problem}"):
        Batch(value, "input")


def test_what_has_no_batch_dimension_cannot_be_split_or_joined() -> None:
    with pytest.raises(TypeError, match=r"^input cannot be split into micro-batches"):
        Batch(torch.tensor(1.0), "input")
    with pytest.raises(RuntimeError, match="cannot concatenate the outputs of 2 micro-batches"):
        joined([torch.tensor(1.0), torch.tensor(2.0)])


@pytest.mark.parametrize(
    "others", [(torch.ones(2), 2), [torch.ones(2), 1], (torch.ones(2), 1, None), {"a": torch.ones(2)}]
)
def test_outputs_that_differ_in_more_than_their_tensors_are_not_joined(others: object) -> None:
    with pytest.raises(TypeError, match="cannot join the outputs of 2 micro-batches: they differ"):
        joined([(torch.ones(2), 1), others])


def test_one_part_is_its_own_sum_even_without_a_batch_dimension() -> None:
    only = torch.tensor(1.0)
    assert joined([only]) is only
