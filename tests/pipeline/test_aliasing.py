"""Tensors that share memory: told from those that do not, and made again from one that crosses; aligned copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.pipeline.aliasing import ALIGNMENT, aligned_clone, find_aliases

Case = Callable[[Tensor], Sequence[Tensor]]

SHARING: dict[str, Case] = {
    "a view": lambda base: [base, base.view(-1)],
    "a slice": lambda base: [base, base[1:3]],
    "a slice before its base": lambda base: [base[1:3, 2:], base],
    "a transpose": lambda base: [base, base.t()],
    "the same again": lambda base: [base, base.view_as(base)],
    "overlapping slices": lambda base: [base[:3], base[2:]],
    "two views of what does not cross": lambda base: [base[0], base.view(-1)],
    "expanded": lambda base: [base, base[:1].expand(4, 6)],
    "every other column": lambda base: [base, base[:, ::2]],
    "a diagonal": lambda base: [base, base.diagonal()],
}


@pytest.mark.parametrize("case", SHARING)
def test_a_write_through_one_is_seen_through_all_that_are_made_again(case: str) -> None:
    tensors = SHARING[case](torch.arange(24.0).reshape(4, 6))
    bases, aliases = find_aliases(tensors)
    assert aliases
    crossing = [*tensors, *bases]
    copies = [tensor if place in aliases else tensor.clone() for place, tensor in enumerate(crossing)]
    again = [
        aliases[place].build(copies[aliases[place].of]) if place in aliases else copies[place]
        for place in range(len(tensors))
    ]
    assert all(torch.equal(*pair) for pair in zip(again, tensors, strict=True))
    for values in (tensors, again):
        values[0].mul_(-1)
    assert all(torch.equal(*pair) for pair in zip(again, tensors, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        lambda base: [base, base.clone()],
        lambda base: list(base.split(2)),
        lambda base: list(base.split(3, dim=1)),
        lambda base: list(base.unbind(1)),
        lambda base: list(base.view(2, 2, 6).unbind(1)),
        lambda base: [base[:0], base],
        lambda base: [base],
        lambda base: [None, base, None],
        lambda base: [],
    ],
)
def test_tensors_that_overlap_nothing_cross_as_they_are(case: Case) -> None:
    """Else a layer that splits its input, as attention does, would send the whole of it along."""
    assert find_aliases(case(torch.arange(24.0).reshape(4, 6))) == ([], {})


def test_one_base_crosses_for_two_views_of_it() -> None:
    base = torch.rand(4, 6)
    bases, aliases = find_aliases([base[:3], torch.ones(1), base[2:]])
    assert len(bases) == 1 and bases[0] is base
    assert {place: alias.of for place, alias in aliases.items()} == {0: 3, 2: 3}


def test_gradients_reach_the_base_through_its_aliases_but_not_through_a_detached_one() -> None:
    source = torch.arange(6.0, requires_grad=True)
    base = source * 1
    _, aliases = find_aliases([base, base[2:4], base.detach()])
    assert [aliases[place].detached for place in (1, 2)] == [False, True]
    crossed = torch.arange(6.0, requires_grad=True)
    view, detached = (aliases[place].build(crossed) for place in (1, 2))
    assert view.requires_grad and not detached.requires_grad
    view.sum().backward()
    assert torch.equal(crossed.grad, torch.tensor([0.0, 0, 1, 1, 0, 0]))


def test_two_slices_that_have_an_element_in_common_are_never_taken_for_strangers() -> None:
    base = torch.arange(12).reshape(3, 4)
    rows, columns = ([slice(*ends) for ends in itertools.combinations(range(size + 1), 2)] for size in (3, 4))
    slices = [base[part] for part in itertools.product(rows, columns)]
    elements = [set(tensor.flatten().tolist()) for tensor in slices]
    missed = [
        (first, second)
        for first, second in itertools.combinations(range(len(slices)), 2)
        if elements[first] & elements[second] and not find_aliases([slices[first], slices[second]])[1]
    ]
    assert missed == []


def test_a_write_to_one_of_two_overlapping_slices_has_its_gradient_on_both_sides_of_a_boundary() -> None:
    class Slices(nn.Module):
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            return input[:, 1:], input[:, :2, 1:4]

    class Writes(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            pair[0].mul_(10)
            return (pair[0].sum((1, 2)) + pair[1].sum((1, 2)))[:, None]

    linear = nn.Linear(6, 6).double()
    gradients = []
    for balance in ([3], [2, 1]):
        with GPipe(nn.Sequential(linear, Slices(), Writes()), balance, checkpoint="never") as pipe:
            pipe(torch.ones(2, 4, 6).double()).sum().backward()
        gradients.append(linear.weight.grad)
        linear.zero_grad()
    assert torch.equal(*gradients)


def test_windows_that_overlap_across_rows_are_not_taken_for_strangers() -> None:
    flat = torch.arange(24)
    assert find_aliases([flat.unfold(0, 3, 6), flat[5:].unfold(0, 3, 6)])[1]


def test_slices_that_do_not_overlap_cross_on_their_own_beside_tensors_that_do() -> None:
    """Halves of one tensor entered a pipe, the first twice: the second half was made from the first, past its end."""
    both = torch.arange(24.0)
    first, second = both[:12], both[12:]
    bases, aliases = find_aliases([first.detach(), second.detach(), first.detach()])
    assert bases == []
    assert {place: alias.of for place, alias in aliases.items()} == {2: 0}


def test_a_part_is_made_from_the_whole_and_never_the_whole_from_a_part() -> None:
    whole = torch.arange(6.0)
    _, aliases = find_aliases([whole[2:4].detach(), whole.detach()])
    assert {place: alias.of for place, alias in aliases.items()} == {0: 1}


def test_tensors_of_which_none_holds_the_others_are_made_from_the_memory_of_all() -> None:
    whole = torch.arange(8.0)
    bases, aliases = find_aliases([whole[1:4].detach(), whole[2:7].detach()])
    (base,) = bases
    assert torch.equal(base, whole[1:7])
    made = [aliases[place].build(base.clone()) for place in (0, 1)]
    assert torch.equal(made[0], whole[1:4])
    assert torch.equal(made[1], whole[2:7])


@pytest.mark.parametrize("begin", [0, 1, 5, 16])
def test_a_copy_has_the_values_strides_and_alignment_of_the_tensor(begin: int) -> None:
    flat = torch.arange(64.0)[begin : begin + 24]
    for tensor in (flat, flat.view(4, 6), flat.view(4, 6).t(), flat[:0]):
        copied = aligned_clone(tensor)
        assert torch.equal(copied, tensor)
        assert copied.stride() == tensor.stride()
        assert copied.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT
        copied.zero_()
        assert not tensor.numel() or tensor.any()
