"""A traced sequence has the bits and names of the model it was made from, in both modes and in a pipe."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from gpipe_cli import GPipe
from gpipe_cli.sequential import LayerSequence, layer_class, to_sequential
from gpipe_cli.vision import torchvision

CHECKPOINT_MODES = ("always", "except_last", "never")


class Residual(nn.Module):
    """Functions between modules, writes in place, and two tensors alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        value: Tensor = self.norm(self.first(input)).relu_()
        value = self.second(value)
        value += input
        return torch.tanh(value)


class Net(nn.Module):
    """Names that are hard to keep: tensors of the root, unused ones, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.blocks = nn.Sequential(*(Residual() for _ in range(3)))
        self.unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.plain = torch.full((4,), 0.5)

    def forward(self, input: Tensor) -> Tensor:
        value = input * self.scale + self.offset * 2 + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])
        output: Tensor = self.head(self.blocks(value) * self.scratch)
        return output


def tensors_of(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def backward(model: nn.Module, *inputs: Tensor, as_tuple: bool = False) -> tuple[Tensor, ...]:
    model.zero_grad()
    outputs = tensors_of(model(inputs) if as_tuple else model(*inputs))
    torch.autograd.backward([output.square().sum() for output in outputs])
    return tuple(output.detach() for output in outputs)


def assert_same_gradients(original: nn.Module, other: nn.Module) -> None:
    for (expected_name, expected), (name, actual) in zip(
        original.named_parameters(), other.named_parameters(), strict=True
    ):
        assert expected_name == name
        assert (expected.grad is None) == (actual.grad is None), name
        assert expected.grad is None or actual.grad is None or torch.equal(expected.grad, actual.grad), name


def assert_same(
    original: nn.Module, sequence: LayerSequence, *inputs: Tensor, balances: Iterable[int] = ()
) -> None:
    """Outputs, gradients and buffers in both modes, alone and in pipes cut at each of `balances`."""
    as_tuple = len(inputs) > 1
    assert list(sequence.state_dict()) == list(original.state_dict())
    for training in (True, False):
        original.train(training)
        state = copy.deepcopy(original.state_dict())
        expected = backward(original, *inputs)
        sequence.load_state_dict(state)
        given = backward(sequence.train(training), *inputs, as_tuple=as_tuple)
        assert all(map(torch.equal, given, expected)) and len(given) == len(expected)
        assert_same_gradients(original, sequence)
        for name, tensor in original.state_dict().items():
            assert torch.equal(tensor, sequence.state_dict()[name]), name
        for first in balances:
            for checkpoint in CHECKPOINT_MODES:
                sequence.load_state_dict(state)
                balance = [first, len(sequence) - first]
                with GPipe(sequence, balance, devices=["cpu", "cpu"], checkpoint=checkpoint) as pipe:
                    given = backward(pipe.train(training), *inputs, as_tuple=as_tuple)
                assert all(map(torch.equal, given, expected)), (balance, checkpoint)
                assert_same_gradients(original, sequence)


def traced(model: nn.Module, *inputs: Tensor, leaves: Iterable[str] = ()) -> LayerSequence:
    """Return a sequence of a copy, to compare with the model."""
    return to_sequential(copy.deepcopy(model), inputs if len(inputs) > 1 else inputs[0], leaves)


def test_every_cut_in_every_checkpoint_mode_gives_the_originals_bits() -> None:
    original, input = Net(), torch.randn(6, 4)
    sequence = traced(original, input)
    assert len(sequence) >= 8
    assert_same(original, sequence, input, balances=range(1, len(sequence)))


def test_the_model_is_unchanged_and_shares_its_parameters() -> None:
    model = Net().train()
    model.blocks[1].eval()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    sequence = to_sequential(model, torch.randn(2, 4))
    after = model.state_dict(keep_vars=True)
    assert all(
        id(after[name]) == place and torch.equal(after[name], value)
        for name, (place, value) in before.items()
    )
    assert [module.training for module in model.blocks] == [True, False, True]
    assert vars(model).keys() == vars(Net()).keys()
    assert all(
        parameter is dict(model.named_parameters())[name] for name, parameter in sequence.named_parameters()
    )


def test_unused_tensors_and_buffers_that_are_not_saved_keep_their_names() -> None:
    model = Net()
    sequence = to_sequential(model, torch.empty(2, 4, device="meta"))
    assert [name for name, _ in sequence.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert "scratch" not in sequence.state_dict() and "unused.1.running_mean" in sequence.state_dict()
    sequence.load_state_dict(Net().state_dict())
    model.load_state_dict(sequence.state_dict())


def test_layers_are_named_after_the_modules_they_use() -> None:
    names = to_sequential(Net(), torch.randn(2, 4)).layer_names
    assert names[-5:] == ("blocks.0", "blocks.1", "blocks.2", "scratch", "head")
    assert len(set(names)) == len(names)


class Sized(nn.Module):
    """Sizes live from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

    def forward(self, input: Tensor) -> Tensor:
        rows, columns = input.shape[0], input.shape[1]
        shape = input.shape
        value = self.layers(input.reshape(rows * columns, 3))
        output: Tensor = value.view(shape).sum(-1).view(rows, columns)
        return output


def test_sizes_cross_whatever_the_batch() -> None:
    original = Sized()
    sequence = traced(original, torch.randn(2, 5, 3))
    assert len(sequence) == 4
    assert_same(original, sequence, torch.randn(7, 5, 3), balances=(1, 2, 3))
    with GPipe(sequence, [2, 2], devices=["cpu", "cpu"], chunks=3) as pipe:
        input = torch.randn(7, 5, 3)
        torch.testing.assert_close(pipe(input), original(input))


class Masked(nn.Module):
    """Tensors without gradient cross, and an argument has a default that must not become an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, input: Tensor, other: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        positive, order = input > 0, other.argsort(-1)
        value = self.second(self.first(input)) if mask is None else input
        value = self.third(value).masked_fill(positive, 0.0)
        return value.gather(-1, order), value + other


def test_several_inputs_and_outputs_and_tensors_without_gradient() -> None:
    original = Masked()
    inputs = torch.randn(5, 4), torch.randn(5, 4)
    sequence = traced(original, *inputs)
    assert len(sequence) >= 2
    assert_same(original, sequence, *inputs, balances=range(1, len(sequence)))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        dropped = dropout(self.inner(input), 0.5, self.training)
        return dropout(dropped, 0.5, training=not self.training)


def test_training_is_read_from_its_own_module_when_a_layer_runs() -> None:
    model = nn.Sequential(Dropping(), Dropping())
    sequence = to_sequential(model, torch.randn(2, 4))
    input = torch.randn(64, 4)
    for part in (True, False):
        for of_model, of_sequence in ((model[0], sequence[0]), (model[1], sequence[1])):
            of_model.train(part)
            of_sequence.train(part)
        model[1].eval()
        sequence[1].eval()
        outputs = []
        for module in (model, sequence):
            torch.manual_seed(0)
            outputs.append(module(input))
        assert torch.equal(*outputs)


class TwoModes(nn.Module):
    """Has an auxiliary head in training only, so the graphs of the modes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.middle, self.head = (Residual() for _ in range(3))
        self.auxiliary = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        value = self.stem(input)
        extra = self.auxiliary(value) if self.training else None
        value = self.head(self.middle(value))
        return value if extra is None else (value, extra)


def test_a_model_with_different_graphs_in_both_modes_behaves_like_the_original() -> None:
    original, input = TwoModes(), torch.randn(6, 4)
    sequence = traced(original, input)
    assert_same(original, sequence, input, balances=range(1, len(sequence)))


class Tied(nn.Module):
    """A weight with two names, a module called twice, and a batch norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.shared = nn.Linear(4, 4)
        self.between = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.norm = nn.BatchNorm1d(4)
        self.other_name = self.between
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.shared(self.between(self.shared(self.embedding(tokens))))
        value = self.norm(self.between(self.norm(value)))
        output: Tensor = self.head(value)
        return output


def test_tied_parameters_and_modules_called_twice_sum_their_gradients() -> None:
    original, tokens = Tied().double(), torch.randint(5, (9,))
    sequence = traced(original, tokens)
    assert list(sequence.state_dict()) == list(original.state_dict())
    assert "other_name.0.weight" in sequence.state_dict()
    expected = backward(original, tokens)
    state = copy.deepcopy(original.state_dict())
    for first in range(1, len(sequence)):
        for checkpoint in CHECKPOINT_MODES:
            sequence.load_state_dict(state)
            with GPipe(
                sequence, [first, len(sequence) - first], devices=["cpu"] * 2, checkpoint=checkpoint
            ) as pipe:
                given = backward(pipe, tokens)
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
            for (name, reference), parameter in zip(
                original.named_parameters(), sequence.parameters(), strict=True
            ):
                assert reference.grad is not None and parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=1e-12)


class ReadsValues(nn.Module):
    """Childless, so a leaf; its forward depends on values, which meta tensors do not have."""

    def forward(self, input: Tensor) -> Tensor:
        return input if input.sum().item() > 0 else -input


def test_a_leaf_that_reads_values_runs_on_a_copy_of_the_model() -> None:
    original = nn.Sequential(nn.Linear(4, 4), ReadsValues(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    before = copy.deepcopy(original.state_dict())
    sequence = to_sequential(original, torch.randn(3, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())
    assert len(sequence) == 4
    assert len(to_sequential(original, torch.empty(3, 4, device="meta"))) == 4


def padded(value: Tensor, sides: list[int]) -> Tensor:
    sides[0] = 1  # as torchvision's swin3d writes into its argument
    return nn.functional.pad(value, sides)


torch.fx.wrap("padded")


class Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.second(padded(self.first(input), [0, 0]))
        return output


def test_a_function_may_write_into_a_list_argument() -> None:
    original, input = Listing(), torch.randn(2, 4)
    assert_same(original, traced(original, input), input)


def test_a_traced_sequence_can_be_copied_and_moved() -> None:
    sequence = to_sequential(Net(), torch.randn(2, 4)).eval()
    other = copy.deepcopy(sequence).double()
    assert other.state_dict()["scale"].dtype == torch.float64
    assert sequence.state_dict()["scale"].dtype == torch.float32
    input = torch.randn(2, 4)
    assert torch.equal(copy.deepcopy(sequence)(input), sequence(input))


@pytest.mark.slow
def test_a_traced_sequence_can_be_sent_to_another_process() -> None:
    model = torchvision.models.googlenet(weights=None, init_weights=True, num_classes=3)
    sequence = to_sequential(model, torch.empty(2, 3, 64, 64, device="meta")).eval()
    other = pickle.loads(pickle.dumps(sequence))  # noqa: S301 - its own bytes
    input = torch.randn(2, 3, 64, 64)
    assert torch.equal(other(input), sequence(input))
    assert list(other.state_dict()) == list(sequence.state_dict())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(2, 2, batch_first=True) for _ in range(2))

    def forward(self, input: Tensor) -> Tensor:
        value, state = self.first(input)
        output: Tensor = self.second(value, tuple(part.tanh() for part in state))[0]
        return output


def test_modules_may_exchange_tuples_of_tensors() -> None:
    original, input = Recurrent(), torch.randn(4, 3, 2)
    sequence = traced(original, input)
    assert len(sequence) == 2
    for training in (True, False):
        assert torch.equal(sequence.train(training)(input), original.train(training)(input))


def test_a_traced_layer_that_is_a_whole_module_is_called_by_the_class_of_that_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    traced = to_sequential(model, torch.randn(2, 4), leaves=["1"])
    assert dict(zip(traced.layer_names, map(layer_class, traced), strict=True)) == {
        "0": "Linear",
        "1": "Residual",
        "2.0": "Linear",
        "2.1": "Tanh",
    }
    assert layer_class(nn.ReLU()) == "ReLU"
