"""Every message of `verify_skippables`, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from gpipe_cli.skip import Namespace, Skippable, verify_skippables


def problems(*layers: nn.Module) -> list[str]:
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers))
    first, empty, *bullets = str(caught.value).split("\n")
    assert (first, empty) == ("one or more pairs of stash and pop do not match:", "")
    return bullets


def test_pairs_pass(layer: Callable[..., Skippable]) -> None:
    verify_skippables(nn.Sequential())
    verify_skippables(nn.Sequential(layer(stash="a"), layer(stash="b"), nn.ReLU(), layer(pop="ab")))
    verify_skippables(nn.Sequential(layer(stash="a"), layer(pop="a", stash="b"), layer(pop="b")))


def test_pairs_nested_in_other_modules_pass(layer: Callable[..., Skippable]) -> None:
    verify_skippables(
        nn.Sequential(nn.Sequential(layer(stash="a")), nn.Sequential(nn.Sequential(layer(pop="a"))))
    )


def test_pairs_of_one_name_pass_when_isolated(layer: Callable[..., Skippable]) -> None:
    one, two = Namespace(), Namespace()
    begins, ends = (layer(stash="a"), layer(stash="a")), (layer(pop="a"), layer(pop="a"))
    isolated = [begin.isolate(space) for begin, space in zip(begins, (one, two), strict=True)]
    isolated += [end.isolate(space) for end, space in zip(ends, (one, two), strict=True)]
    verify_skippables(nn.Sequential(*isolated))


def test_a_stash_without_pop_is_listed(layer: Callable[..., Skippable]) -> None:
    assert problems(layer(stash="a")) == ["* no module declared 'a' as poppable but stashed"]


def test_a_pop_without_or_before_its_stash_is_listed(layer: Callable[..., Skippable]) -> None:
    assert problems(layer(pop="a")) == ["* '0' declared 'a' as poppable but it was not stashed"]
    assert (
        problems(layer(pop="a"), layer(stash="a"))[0]
        == "* '0' declared 'a' as poppable but it was not stashed"
    )


def test_a_second_stash_or_pop_of_one_name_is_listed(layer: Callable[..., Skippable]) -> None:
    assert problems(layer(stash="a"), layer(stash="a"), layer(pop="a"), nn.Sequential(layer(pop="a"))) == [
        "* '1' redeclared 'a' as stashable but not isolated by namespace",
        "* '3.0' redeclared 'a' as poppable but not isolated by namespace",
    ]


def test_a_layer_used_twice_is_listed(layer: Callable[..., Skippable]) -> None:
    twice = layer(stash="a")
    assert problems(nn.Sequential(twice, twice), layer(pop="a")) == [
        "* '0.1' redeclared 'a' as stashable but not isolated by namespace"
    ]


def test_a_layer_that_stashes_and_pops_one_name_is_listed(layer: Callable[..., Skippable]) -> None:
    assert problems(layer(stash="a", pop="a")) == ["* '0' declared 'a' both as stashable and as poppable"]


def test_isolating_one_end_only_leaves_both_without_partner(layer: Callable[..., Skippable]) -> None:
    assert problems(layer(stash="a").isolate(Namespace()), layer(pop="a")) == [
        "* '1' declared 'a' as poppable but it was not stashed",
        "* no module declared 'a' as poppable but stashed",
    ]


def test_all_problems_are_listed_at_once(layer: Callable[..., Skippable]) -> None:
    assert len(problems(layer(stash="ab"), layer(pop="cd"))) == 4
