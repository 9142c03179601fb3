from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from gpipe_cli.models import gpt, unet
from gpipe_cli.models.resnet import build as resnet
from gpipe_cli.profiling.layer_times import layer_stats
from gpipe_cli.profiling.memory import activation_bytes
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.skip import pop, skippable, stash
from tests.distributed.tasks import make


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
        yield stash("skip", input * 3)
        return input * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
        skip = yield pop("skip")
        return input * skip


class Pair(nn.Module):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input, input.exp()


class Product(nn.Module):
    def forward(self, input: tuple[Tensor, Tensor]) -> Tensor:
        return input[0] * input[1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, input: Tensor) -> Tensor:
        query, key, value = self.project(input).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).flatten(2)


class Looking(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * 2 if input.sum().item() > 0 else input


def image_sample(side: int = 8) -> Sample:
    return Sample(torch.randn(4, 3, side, side), torch.randint(4, (4,)), nn.CrossEntropyLoss())


KEYWORDS = make("keyword_arguments", 3)

CASES = {
    "convolutions, in place": (
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(72, 4),
        ),
        image_sample(),
    ),
    "integers, skips, tuples": (
        nn.Sequential(nn.Embedding(10, 16), Stash(), Pair(), Product(), nn.Linear(16, 16), Pop()),
        Sample(torch.randint(10, (3, 5))),
    ),
    "attention": (
        nn.Sequential(nn.Embedding(10, 16), Attention(), nn.Tanh()),
        Sample(torch.randint(10, (3, 32))),
    ),
    "frozen layers first": (
        nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 2)),
        Sample(torch.randn(5, 8)),
    ),
    "a transformer with a tied head": (
        gpt.build(width=16, depth=1, heads=2, input_shape=(32,)),
        Sample(torch.randint(256, (2, 32)), torch.randint(256, (2, 32)), TokenCrossEntropy()),
    ),
    "a net of long skips": (
        unet.build(depth=2, base_channels=4, input_shape=(3, 16, 16)),
        Sample(torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16)), CrossEntropy()),
    ),
    "keyword arguments": (KEYWORDS.model, Sample(KEYWORDS.input, KEYWORDS.target, KEYWORDS.loss)),
    "a real model": (resnet("resnet18", num_classes=4), image_sample(16)),
}


@pytest.mark.parametrize(("module", "sample"), CASES.values(), ids=CASES)
def test_what_is_said_without_running_is_what_a_run_shows(module: nn.Sequential, sample: Sample) -> None:
    assert list(model_stats(module, sample).layers) == layer_stats(module, sample)


def test_nothing_is_touched() -> None:
    module, sample = CASES["convolutions, in place"]
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    model_stats(module, sample)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(submodule.training for submodule in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    module.train()


def test_a_model_far_larger_than_memory_is_judged() -> None:
    width = 200_000
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    stats = model_stats(module, Sample(torch.empty(2, width, device="meta")))
    assert [layer.parameter_bytes for layer in stats.layers] == [4 * (width * width + width)] * 3
    assert [layer.saved_bytes for layer in stats.layers] == [4 * 2 * width] * 3
    assert stats.operations[1].forward_flops == 2 * 2 * width * width


def test_what_neighbours_share_is_counted_once_for_both() -> None:
    """Tanh keeps its output, and the linear layer keeps the same tensor as its input."""
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    stats = model_stats(module, Sample(torch.randn(4, 16)))
    activation = 4 * 16 * 4
    assert [layer.saved_bytes for layer in stats.layers] == [activation] * 3
    assert stats.saved_bytes(0, 3) == 2 * activation
    assert stats.saved_bytes(1, 3) == activation
    assert stats.saved_bytes(2, 2) == 0


def test_skips_cross_every_border_between_their_layers() -> None:
    module, sample = CASES["integers, skips, tuples"]
    stats = model_stats(module, sample)
    value = (3, 5, 16)
    assert [stats.boundary(layer).shapes for layer in range(1, 7)] == [
        (value,),
        (value, value),
        (value, value, value),
        (value, value),
        (value, value),
        (value,),
    ]
    assert stats.boundary(3).bytes == 3 * 4 * 3 * 5 * 16
    assert stats.boundary(0).shapes == ((3, 5),) and stats.boundary(0).bytes == 8 * 3 * 5


def test_a_skip_arrives_only_where_it_is_popped() -> None:
    module, sample = CASES["integers, skips, tuples"]
    stats = model_stats(module, sample)
    value = (3, 5, 16)
    assert stats.partition_input(3, 5).shapes == (value, value)  # of a pair, while the skip passes by
    assert stats.partition_input(5, 6).shapes == (value, value)  # a tensor and the skip
    assert stats.partition_input(0, 6).shapes == ((3, 5),)


def test_masks_whole_numbers_and_tensors_without_elements_count_as_skips() -> None:
    """Of three rows of seven tokens: the mask has a byte each, a length is one number, the others are empty."""
    module, sample = CASES["keyword arguments"]
    stats = model_stats(module, sample)
    skips = {(skip.begin, skip.end, skip.shape): skip.bytes for skip in stats.skips}
    assert skips == {(0, 4, (3,)): 24, (0, 7, (3, 7)): 21, (0, 7, (3, 0)): 0, (0, 7, (3, 0, 6)): 0}
    value = 4 * 3 * 7 * 6
    assert stats.input.bytes == 2 * 8 * 3 * 7
    assert stats.partition_input(4, 6).bytes == value + 24
    assert stats.partition_input(6, 8).bytes == value + 21
    recomputed = PipelineSpec("gpipe", 3, 2, checkpoint="always")
    inputs = [stats.input.bytes, value + 24, value + 21]
    saved = [stats.saved_bytes(begin, end) for begin, end in ((0, 4), (4, 6), (6, 8))]
    for kept, input, graph in zip(activation_bytes(stats, [4, 2, 2], recomputed), inputs, saved, strict=True):
        assert kept == 2 * input + graph


def test_operations_are_counted_per_layer_both_ways() -> None:
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4, bias=False),
        nn.ReLU(inplace=True),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(8 * 36, 5, bias=False),
    )
    stats = model_stats(module, Sample(torch.randn(2, 4, 8, 8)))
    convolution, linear = 2 * 2 * 36 * (8 * 1 * 9), 2 * 2 * 8 * 36 * 5
    assert [layer.forward_flops for layer in stats.operations] == [convolution, 0, 0, 0, linear]
    # The input needs no gradient, so the first layer does half of what the last one does.
    assert [layer.backward_flops for layer in stats.operations] == [convolution, 0, 0, 0, 2 * linear]


def test_attention_counts_on_a_cpu_too() -> None:
    module, sample = CASES["attention"]
    layer = model_stats(module, sample).operations[1]
    projection, product = 2 * 96 * 16 * 48, 2 * 3 * 2 * 32 * 32 * 8
    assert layer.forward_flops == projection + 2 * product
    assert layer.backward_flops == 2 * projection + 5 * product


def test_backward_of_a_skip_belongs_to_the_layer_that_stashed_it() -> None:
    @skippable(stash=["late"])
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6, bias=False)

        def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
            output = input.tanh()
            yield stash("late", self.linear(output))
            return output

    @skippable(pop=["late"])
    class Sum(nn.Module):
        def forward(self, input: Tensor):  # type: ignore[no-untyped-def]
            late = yield pop("late")
            return input + late

    module = nn.Sequential(nn.Linear(6, 6, bias=False), Late(), nn.ReLU(), Sum())
    product = 2 * 3 * 6 * 6
    layers = model_stats(module, Sample(torch.randn(3, 6))).operations
    assert [layer.backward_flops for layer in layers] == [product, 2 * product, 0, 0]


def test_a_layer_that_looks_at_values_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Looking())
    with pytest.raises(ConfigError, match=r"layer '1' \(Looking\) looks at the values of its tensors"):
        model_stats(module, Sample(torch.randn(2, 4)))


def test_a_layer_that_does_not_fit_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    with pytest.raises(RuntimeError) as caught:
        model_stats(module, Sample(torch.randn(2, 4)))
    assert caught.value.__notes__ == ["in layer '1' (Linear), without values"]


def test_without_flops_the_rest_is_the_same() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
    sample = Sample(torch.randn(2, 3, 8, 8))
    counted, quick = model_stats(module, sample), model_stats(module, sample, count_flops=False)
    assert quick.operations == ()
    assert quick.layers == counted.layers
    assert [sorted(storages.values()) for storages in quick.storages] == [
        sorted(storages.values()) for storages in counted.storages
    ]


def test_equal_layers_are_looked_at_once_and_say_the_same() -> None:
    """A wrapper without a structure of its own, such as a lambda in an attribute, keeps a layer from being repeated."""

    def model(*, differ: bool) -> nn.Sequential:
        built = gpt.build(width=16, depth=6, heads=2, input_shape=(32,))
        for number, layer in enumerate(built):
            layer.own = object() if differ else 3  # type: ignore[assignment]
            assert number < 8
        return built

    sample = Sample(torch.randint(256, (2, 32)), torch.randint(256, (2, 32)), TokenCrossEntropy())
    repeated, looked_at = (model_stats(model(differ=differ), sample) for differ in (False, True))
    assert repeated.operations[2] is repeated.operations[1]
    assert looked_at.operations[2] is not looked_at.operations[1]
    ways = [[(each.forward, each.backward) for each in stats.operations] for stats in (repeated, looked_at)]
    assert ways[0] == ways[1]
    assert repeated.layers == looked_at.layers
    ranges = [(begin, end) for begin in range(8) for end in range(begin + 1, 9)]
    assert [repeated.saved_bytes(*each) for each in ranges] == [
        looked_at.saved_bytes(*each) for each in ranges
    ]


def test_fewer_equal_layers_are_measured_where_memory_is_short() -> None:
    module = nn.Sequential(nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(98)), nn.Linear(8, 4))
    stats = model_stats(module, Sample(torch.randn(2, 4)))

    def layers(room: float) -> int:
        return len(stats.layer_sample(room).places)

    each = 2 * (8 * 8 + 8) * 4 + 2 * 8 * 4  # parameters, gradients, and the input of the micro-batch
    assert layers(inf) == 67 and layers(67 * each) == 67
    assert layers(40 * each) == 35 and layers(10 * each) == 7
    assert layers(0) == 4, "one of each kind, and the last before the output"


def test_layers_that_look_the_same_but_differ_in_a_number_are_told_apart() -> None:
    class Repeats(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(4, 4, bias=False), times

        def forward(self, input: Tensor) -> Tensor:
            for _ in range(self.times):
                input = self.linear(input)
            return input

    stats = model_stats(nn.Sequential(Repeats(1), Repeats(2), Repeats(1)), Sample(torch.randn(2, 4)))
    assert [layer.forward_flops for layer in stats.operations] == [64, 128, 64]


def test_kernels_move_the_bytes_of_their_tensors() -> None:
    stats = model_stats(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout()), Sample(torch.randn(4, 8)))
    (linear, relu, dropout) = stats.operations
    assert [(each.name, each.activation_bytes, each.weight_bytes) for each in linear.forward] == [
        ("addmm", 4 * (4 * 8 + 4 * 16), 4 * (8 * 16 + 16))
    ]
    assert [(each.name, each.flops, each.activation_bytes) for each in relu.forward] == [
        ("relu", 0, 2 * 4 * 4 * 16)
    ]
    # On an accelerator a dropout is one kernel, not one to draw, one to scale and one to multiply.
    assert [each.name for each in dropout.forward] == ["mul"]
    # The input needs no gradient; the gradients of weight and bias are computed, then added to those there are.
    assert [each.name for each in linear.backward] == ["mm", "sum", "add_", "add_"]
    assert all(each.weight_grad == 1 for each in linear.backward)


def test_copies_of_weights_in_16_bits_do_not_grow_with_the_rows() -> None:
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    weight = 8 * 16
    for rows in (1, 5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stats = model_stats(module, Sample(torch.randn(rows, 8)))
        second = stats.operations[1]
        assert [(each.name, each.weight_bytes) for each in second.forward] == [
            ("_to_copy", (4 + 2) * weight),
            ("mm", 2 * weight),
        ]
        assert second.forward[1].half and second.forward[1].aligned
        moved = {each.name: each.weight_bytes for each in second.backward}
        assert moved["_to_copy"] == (4 + 2) * weight and moved["add_"] == 3 * 4 * weight
        assert sum(each.activation_bytes for each in second.backward) == 2 * rows * (2 * 16 + 2 * 8)
