"""Values of tensors: taken apart and put together again, they are what they were."""

from __future__ import annotations

import copy
import enum
import pickle
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpipe_cli.pytree import SINGLE, flatten, flatten_with, map_tensors, unflatten


class Point(NamedTuple):
    x: Any
    y: Any = None


class Color(enum.Enum):
    RED = 1


class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers: a dict whose items are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = "kept"

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


PLAIN = [None, True, 3, 2.5, 1j, "text", b"bytes", range(3), Color.RED]
PLAIN += [torch.float16, torch.device("cpu"), torch.Size([2])]


def values() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from(PLAIN) | st.integers(0, 3).map(lambda number: torch.full((2,), float(number)))
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from(["a", "b", 1]), inner, max_size=3)
            | st.builds(Point, inner, inner)
        ),
        max_leaves=8,
    )


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list) and not isinstance(left, torch.Size):
        return len(left) == len(right) and all(map(same, left, right))
    return left is right if isinstance(left, Tensor) else left == right


@given(value=values())
def test_a_value_comes_back_with_the_same_containers_tensors_and_passengers(value: Any) -> None:
    tensors, template = flatten(value, "value")
    assert same(unflatten(template, tensors), value)
    assert template == flatten(copy.deepcopy(value), "value")[1], "equal values have equal templates"


def test_a_bare_tensor_has_the_template_of_one() -> None:
    tensor = torch.ones(1)
    assert flatten(tensor, "value") == ((tensor,), SINGLE)


def test_a_tensor_that_is_held_twice_is_one_tensor_before_and_after() -> None:
    twice, other = torch.ones(2), torch.ones(2)
    tensors, template = flatten([twice, {"again": twice, "other": other}], "value")
    assert len(tensors) == 2 and tensors[0] is twice and tensors[1] is other
    first, rest = unflatten(template, [torch.zeros(1), torch.ones(1)])
    assert first is rest["again"] and first is not rest["other"]


@pytest.mark.parametrize("kind", [Output, OrderedDict])
def test_a_subclass_of_dict_keeps_its_type_order_and_attributes(kind: type[dict[str, Any]]) -> None:
    value = kind(b=torch.ones(1), a=None)
    value.extra = 7  # type: ignore[attr-defined]
    mapped = map_tensors(lambda tensor: tensor * 2, value)
    assert type(mapped) is kind and list(mapped) == ["b", "a"] and mapped.extra == 7
    assert torch.equal(mapped["b"], torch.full((1,), 2.0)) and mapped["a"] is None
    assert torch.equal(value["b"], torch.ones(1)), "the one it was made from is left alone"


def test_a_defaultdict_still_has_its_default() -> None:
    mapped = map_tensors(torch.clone, defaultdict(list, a=torch.ones(1)))
    assert type(mapped) is defaultdict and mapped["missing"] == []


def test_two_values_made_from_one_template_share_no_container() -> None:
    tensors, template = flatten({"a": [torch.ones(1)], "b": Output(c=torch.ones(2))}, "value")
    first, second = unflatten(template, tensors), unflatten(template, tensors)
    first["a"].append(None)
    first["b"]["d"] = None
    assert len(second["a"]) == 1 and list(second["b"]) == ["c"]


def test_templates_hold_no_tensor() -> None:
    """They outlive the micro-batch: a tensor in them would be kept, and sent to other processes."""
    _, template = flatten(Output(a=[torch.ones(1)], b=Point(torch.ones(1))), "value")
    assert "tensor(" not in repr(template)


def test_templates_of_equal_values_are_equal_after_a_journey_to_another_process() -> None:
    _, template = flatten({"a": Point(torch.ones(1), 3), "b": [None, torch.float16]}, "value")
    assert pickle.loads(pickle.dumps(template)) == template  # noqa: S301 - pickled on this line


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "got object as output"),
        ((torch.ones(1), {1}), r"got set as output\[1\]"),
        ({"mask": [torch.ones(1), Point(lambda: 0)]}, r"got function as output\['mask'\]\[1\]\[0\]"),
        ([iter(())], r"got tuple_iterator as output\[0\]"),
    ],
)
def test_a_foreign_object_is_refused_by_its_type_and_path(value: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=f"^expected Tensor, but {problem}$"):
        flatten(value, "output")


def test_what_counts_as_a_tensor_may_be_decided_by_the_caller() -> None:
    tensor = torch.ones(1)
    tensors, template = flatten_with(["x", 1], "value", lambda member: tensor if member == "x" else None)
    assert len(tensors) == 1 and tensors[0] is tensor
    assert unflatten(template, ["y"]) == ["y", 1]  # type: ignore[list-item]
