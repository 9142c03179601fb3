from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_cli.profiling.equal_layers import LayerSample, layer_key
from gpipe_cli.sequential import LayerSequence, layer_names

VALUE = torch.zeros(2, 4)


def test_equal_layers_have_equal_keys_whatever_their_values() -> None:
    assert layer_key(nn.Linear(4, 4), VALUE) == layer_key(nn.Linear(4, 4), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        (nn.Linear(4, 5), VALUE),
        (nn.Linear(4, 4, bias=False), VALUE),
        (nn.Linear(4, 4).requires_grad_(False), VALUE),
        (nn.Linear(4, 4).eval(), VALUE),
        (nn.Linear(4, 4), torch.zeros(3, 4)),
        (nn.Linear(4, 4), VALUE.double()),
        (nn.Linear(4, 4), (VALUE, 1)),
        (nn.Linear(4, 4), (VALUE, True)),
    ],
)
def test_whatever_changes_the_work_changes_the_key(layer: nn.Module, value: object) -> None:
    assert layer_key(layer, value) != layer_key(nn.Linear(4, 4), VALUE)


def test_plain_values_of_other_types_are_different() -> None:
    assert layer_key(nn.ReLU(), (VALUE, 1)) != layer_key(nn.ReLU(), (VALUE, True))


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    st.sets(st.integers(0, 40), max_size=10),
    st.integers(1, 4),
)
def test_a_sample_has_every_kind_and_continues_only_where_an_equal_layer_would(
    kinds: list[str], crossed: set[int], most: int
) -> None:
    sample = LayerSample.of(kinds, crossed, most)
    places = list(sample.places)
    assert places == sorted(set(places)) and places[-1] == len(kinds) - 1
    assert {kinds[place] for place in places} == set(kinds)
    for before, place in pairwise([-1, *places]):
        left_out = range(before + 1, place)
        # The layer that would have come next is equal to the one that comes, and no skip passes either of them.
        assert not left_out or (kinds[left_out[0]] == kinds[place] and not {left_out[0], place} & crossed)
    numbers = [float(ord(kinds[place])) for place in places]
    assert sample.for_all(numbers) == [float(ord(kind)) for kind in kinds]


def test_of_thousands_of_equal_layers_some_stand_for_all() -> None:
    kinds = ["first", *["block", "norm"] * 2000, "head"]
    sample = LayerSample.of(kinds, ())
    assert len(sample.places) < 140 and not sample.is_whole
    model = LayerSequence(
        [nn.Identity() for _ in kinds], names=[f"{kind} {n}" for n, kind in enumerate(kinds)]
    )
    assert layer_names(sample.layers(model))[-2:] == ("norm 4000", "head 4001")


def test_a_model_of_few_layers_is_its_own_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sample = LayerSample.of([0, 0], ())
    assert sample.is_whole and sample.layers(model) is model
    assert sample.for_all([1.0, 3.0]) == [2.0, 2.0]
