"""A LayerSequence keeps the names of the model it was made from, through copies, conversions and loading."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli.sequential import LayerSequence


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(self.linear(input)).relu()


class Original(nn.Module):
    """What makes names hard to keep: nesting, members of the root, a tie, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 4, bias=False)
        self.first = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.head.weight = self.first.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(input) * self.scale + self.offset + self.scratch))


class Start(nn.Module):
    """The part of the root that runs first, with the names it has there."""

    def __init__(self, original: Original) -> None:
        super().__init__()
        self.first, self.offset = original.first, original.offset
        self.register_buffer("scale", original.scale)
        self.register_buffer("scratch", original.scratch, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.first(input) * self.scale + self.offset + self.scratch


def make_sequence(original: Original) -> LayerSequence:
    layers = [Start(original), *original.blocks, original.head]
    return LayerSequence(layers, paths=["", "blocks.0", "blocks.1", "head"], original=original)


@pytest.fixture
def original() -> Original:
    torch.manual_seed(0)
    return Original()


@pytest.fixture
def sequence(original: Original) -> LayerSequence:
    return make_sequence(original)


def pickle_round_trip(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # our own bytes


def same_members(left: Iterable[tuple[str, Tensor]], right: Iterable[tuple[str, Tensor]]) -> bool:
    left, right = list(left), list(right)
    return [name for name, _ in left] == [name for name, _ in right] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(left, right, strict=True)
    )


def assert_same_names_and_values(sequence: nn.Module, original: nn.Module) -> None:
    assert same_members(sequence.state_dict().items(), original.state_dict().items())
    for remove_duplicate in (True, False):
        settings = {"remove_duplicate": remove_duplicate}
        assert same_members(sequence.named_parameters(**settings), original.named_parameters(**settings))
        assert same_members(sequence.named_buffers(**settings), original.named_buffers(**settings))


def test_names_values_and_order_are_those_of_the_original(
    sequence: LayerSequence, original: Original
) -> None:
    assert_same_names_and_values(sequence, original)
    assert [id(a) for a in sequence.parameters()] == [id(b) for b in original.parameters()]
    assert same_members(sequence.named_parameters("pipe"), original.named_parameters("pipe"))


@pytest.mark.parametrize("change", [copy.deepcopy, pickle_round_trip, nn.Module.double, nn.Module.eval])
def test_names_survive_copies_and_conversions(
    change: Callable[[nn.Module], nn.Module], sequence: LayerSequence, original: Original
) -> None:
    changed, expected = change(sequence), change(original)
    assert_same_names_and_values(changed, expected)
    before = copy.deepcopy(expected.state_dict())
    assert str(changed.load_state_dict(before)) == "<All keys matched successfully>"
    assert changed.state_dict()["head.weight"].data_ptr() == changed.state_dict()["first.weight"].data_ptr()


def test_loading_into_a_copy_leaves_the_first_alone(sequence: LayerSequence) -> None:
    clone = copy.deepcopy(sequence)
    clone.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in clone.state_dict().items()})
    assert not clone.state_dict()["blocks.1.linear.weight"].any()
    assert sequence.state_dict()["blocks.1.linear.weight"].any()


@pytest.mark.parametrize("assign", [True, False])
def test_weights_go_from_the_original_to_the_sequence_and_back(sequence: LayerSequence, assign: bool) -> None:
    other = Original().eval()
    state = other.state_dict()
    names = list(state)
    sequence.eval().load_state_dict(state, assign=assign)
    assert list(state) == names, "loading leaves the given state_dict alone"
    input = torch.randn(3, 4)
    assert torch.equal(sequence(input), other(input))
    third = Original().eval()
    third.load_state_dict(sequence.state_dict(), assign=assign)
    assert torch.equal(third(input), other(input))


def test_missing_unexpected_and_misshapen_are_reported_by_their_original_names(
    sequence: LayerSequence,
) -> None:
    state = sequence.state_dict()
    del state["blocks.1.linear.bias"]
    state["blocks.1.linear.extra"] = torch.zeros(1)  # inside a module of a layer
    state["elsewhere.weight"] = torch.zeros(1)  # in no layer
    state["1.linear.weight"] = torch.zeros(4, 4)  # a layer key is no name
    report = sequence.load_state_dict(state, strict=False)
    assert report.missing_keys == ["blocks.1.linear.bias"]
    assert sorted(report.unexpected_keys) == [
        "1.linear.weight",
        "blocks.1.linear.extra",
        "elsewhere.weight",
    ]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks\.1\.linear\.bias"'):
        sequence.load_state_dict(state)

    state = sequence.state_dict()
    state["blocks.0.linear.weight"] = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.linear\.weight: copying"):
        sequence.load_state_dict(state, strict=False)
    assert "blocks.0.linear.weight" in sequence.state_dict()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)


def test_inside_another_module_keys_carry_its_prefix(sequence: LayerSequence, original: Original) -> None:
    outer, plain = Outer(sequence), Outer(original)
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    assert same_members(outer.state_dict().items(), plain.state_dict().items())

    state = plain.state_dict()
    del state["inner.blocks.0.norm.weight"], state["before.bias"], state["after.bias"]
    state["inner.blocks.0.norm.other"] = state["outer"] = torch.zeros(1)
    report = outer.load_state_dict(state, strict=False)
    assert report.missing_keys == ["before.bias", "inner.blocks.0.norm.weight", "after.bias"]
    assert sorted(report.unexpected_keys) == ["inner.blocks.0.norm.other", "outer"]
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.offset: copying"):
        outer.load_state_dict(plain.state_dict() | {"inner.offset": torch.zeros(7)})


class Renamed(nn.Linear):
    """Like several modules of torchvision, it accepts the names of an older version."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
        if prefix + "matrix" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "matrix")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_still_sees_the_old_names_it_knows_how_to_load() -> None:
    sequence = LayerSequence([nn.Sequential(Renamed(2, 2, bias=False))], paths=["encoder"])
    sequence.load_state_dict({"encoder.0.matrix": torch.full((2, 2), 7.0)})
    assert torch.equal(sequence.state_dict()["encoder.0.weight"], torch.full((2, 2), 7.0))


def test_one_module_in_two_layers_has_one_name() -> None:
    shared = nn.Linear(4, 4)
    sequence = LayerSequence([shared, nn.ReLU(), shared], paths=["shared", "relu", "shared"])
    assert list(sequence.state_dict()) == ["shared.weight", "shared.bias"]
    assert [name for name, _ in sequence.named_parameters(remove_duplicate=False)] == [
        "shared.weight",
        "shared.bias",
    ]
    assert sequence.load_state_dict({}, strict=False).missing_keys == ["shared.weight", "shared.bias"]
    sequence.load_state_dict({"shared.weight": torch.zeros(4, 4), "shared.bias": torch.ones(4)})
    assert torch.equal(sequence(torch.randn(2, 4)), torch.ones(2, 4))


def test_a_plain_list_of_layers_has_the_names_of_nn_sequential() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]
    assert_same_names_and_values(LayerSequence(layers), nn.Sequential(*layers))


def test_layer_names_default_to_paths_and_indices(sequence: LayerSequence) -> None:
    assert sequence.layer_names == ("0", "blocks.0", "blocks.1", "head")
    assert LayerSequence([nn.ReLU(), nn.ReLU()], names=["stem", "end"]).layer_names == ("stem", "end")


def test_a_slice_keeps_the_names_of_its_layers(sequence: LayerSequence, original: Original) -> None:
    part = sequence[1:3]
    assert isinstance(part, LayerSequence)
    assert part.layer_names == ("blocks.0", "blocks.1")
    assert list(part.state_dict()) == [name for name in original.state_dict() if name.startswith("blocks")]
    assert sequence[3] is original.head
    assert set(sequence[:1].state_dict()) | set(sequence[1:].state_dict()) == set(original.state_dict())


def test_hooks_of_torch_see_the_original_names(sequence: LayerSequence, original: Original) -> None:
    recorded: list[list[str]] = []
    sequence.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: recorded.append(list(state))
    )
    sequence.register_forward_hook(lambda module, arguments, output: output + 1)
    sequence.state_dict()
    assert recorded == [list(original.state_dict())]
    input = torch.randn(3, 4)
    assert torch.equal(sequence.eval()(input), original.eval()(input) + 1)


def test_inconsistent_arguments_are_refused(original: Original) -> None:
    with pytest.raises(ValueError, match=r"1 paths for 2 layers \(paths: \['a'\]\)"):
        LayerSequence([nn.ReLU(), nn.ReLU()], paths=["a"])
    with pytest.raises(ValueError, match="3 names for 1 layers"):
        LayerSequence([nn.ReLU()], names=["a", "b", "c"])
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' are different tensors .*'a\.weight'"):
        LayerSequence([nn.Linear(1, 1), nn.Linear(1, 1)], paths=["a", "a"])
    with pytest.raises(ValueError, match=r"missing \['offset', .*extra \['tail\.weight'\]"):
        LayerSequence([original.head], paths=["tail"], original=original)


def test_a_sequence_with_an_added_layer_refuses_to_name_its_tensors(sequence: LayerSequence) -> None:
    sequence.append(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="made of 4 layers and now has 5"):
        sequence.state_dict()


Tree = dict[str, "Tree"] | None
trees = st.recursive(
    st.none(),
    lambda children: st.dictionaries(
        st.sampled_from(["a", "b", "0", "1", "2", "10"]), children, min_size=1, max_size=4
    ),
    max_leaves=8,
)


def build_module(tree: Tree) -> nn.Module:
    if tree is None:
        return nn.BatchNorm1d(2)
    module = nn.Module()
    for name, child in tree.items():
        module.add_module(name, build_module(child))
    return module


@settings(max_examples=60)
@given(tree=trees, seed=st.integers(0, 1000))
def test_any_tree_cut_at_its_leaves_in_any_order_keeps_its_names(tree: Tree, seed: int) -> None:
    original = build_module(tree or {"0": None})  # names that look like layer keys, too
    leaves = [(path, part) for path, part in original.named_modules() if isinstance(part, nn.BatchNorm1d)]
    random.Random(seed).shuffle(leaves)
    sequence = LayerSequence(
        [part for _, part in leaves], paths=[path for path, _ in leaves], original=original
    )
    assert_same_names_and_values(sequence, original)
    values = {
        name: torch.full_like(tensor, index)
        for index, (name, tensor) in enumerate(original.state_dict().items())
    }
    sequence.load_state_dict(values)
    assert same_members(original.state_dict().items(), values.items())


class Versioned(nn.Module):
    """Converts weights that an older version saved, as torchvision's MNASNet does."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loaded_versions: list[object] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded_versions.append(metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def test_what_a_sequence_saves_has_the_version_of_the_original() -> None:
    original = Versioned()
    sequence = LayerSequence([original.layer], paths=["layer"], original=original)
    original.load_state_dict(sequence.state_dict())
    assert original.loaded_versions == [3]
    outer = nn.ModuleDict({"inner": LayerSequence([Versioned(), nn.BatchNorm1d(2)], paths=["a.b", "norm"])})
    versions = outer.state_dict()._metadata
    assert versions["inner.a.b"] == {"version": 3} and versions["inner.norm"] == {"version": 2}
