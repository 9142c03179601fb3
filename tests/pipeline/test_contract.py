"""A pipe computes what plain autograd computes on the same micro-batches, or raises with the reason and what to do.

Each test tells of something that was once wrong in silence, or refused without need.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.gpipe import plain_pipe
from tests.support.pipes import (
    CHECKPOINTS,
    SCHEDULES,
    WIDTH,
    Do,
    Hands,
    Pop,
    Reentrant,
    Stash,
    assert_same,
    batch,
    compare,
    enter_step,
    linear,
    pipe_steps,
    plain_steps,
)


class Holder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        return self.module(input)


# A checkpointed forward runs the code of its recompute.


def test_what_autograd_saves_in_a_checkpointed_forward_is_dropped_when_its_layer_has_returned() -> None:
    alive: list[bool] = []
    saved: list[Any] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor) -> Tensor:
            large = input.exp()
            saved.append(weakref.ref(large.untyped_storage()))
            ctx.save_for_backward(large)
            return input * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    def look(input: Tensor) -> Tensor:
        alive.append(saved[-1]() is not None)
        return input * 1

    model = nn.Sequential(linear(), Do(Saves.apply), Do(look))
    with GPipe(model, [3], checkpoint="always") as pipe:
        pipe.step(*batch(), functional.mse_loss)
    assert alive == [False, True]  # forward, then recompute


def test_a_backward_through_earlier_layers_inside_a_checkpointed_forward_is_refused() -> None:
    class Backwards(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            input.square().sum().backward(retain_graph=True)
            return input * 1

    model = nn.Sequential(linear(), nn.Tanh(), Backwards())
    with (
        GPipe(model, [3], checkpoint="always") as pipe,
        pytest.raises(
            RuntimeError,
            match=r"runs a backward through earlier layers inside its forward.*checkpoint='never'",
        ),
    ):
        pipe.step(*batch(), functional.mse_loss)


def test_an_input_that_is_not_dense_keeps_its_strides_in_the_first_step_and_in_later_ones() -> None:
    """The copy for recompute was dense in the first step, so its kernels and bits were others."""
    seen: list[tuple[int, ...]] = []

    def look(input: Tensor) -> Tensor:
        seen.append(input.stride())
        return input * 1

    wide = [nn.Linear(WIDTH, 8), Do(lambda x: x[:, :WIDTH]), Do(look)]
    compare([*wide, linear()], [2, 2], checkpoint="always")
    assert set(seen) == {(8, 1)}


# State that forwards change.


class Count(nn.Module):
    """Counts from step `begins` on, in one of several ways; the count decides the output."""

    at_step = 0

    def __init__(self, how: str, begins: int) -> None:
        super().__init__()
        self.how, self.begins = how, begins
        self.register_buffer("count", None if how == "none" else torch.zeros(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        if self.count is None:
            self.count = torch.zeros(WIDTH)
        if self.at_step >= self.begins:
            if self.how == "replace":
                self.count = self.count + 1
            elif self.how == "register":
                self.register_buffer("count", self.count + 1)
            else:
                (self.count.data if self.how == "data" else self.count).add_(1)
        return input * (1 + 0.25 * self.count)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("begins", [0, 1, 2])
@pytest.mark.parametrize("how", ["add", "data", "replace", "none", "register"])
def test_a_buffer_changes_once_per_micro_batch_whenever_it_begins(
    how: str, begins: int, checkpoint: str
) -> None:
    """A buffer that began to change in step 2 counted twice, and one that began as None three times."""
    torch.manual_seed(0)
    layers = [linear(), Count(how, begins), linear()]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    expected = plain_steps(plain, functional.mse_loss, 3, 4)
    with GPipe(model, [2, 1], chunks=4, checkpoint=checkpoint) as pipe:
        try:
            given = pipe_steps(pipe, functional.mse_loss, 3)
        except RuntimeError as error:
            # The graph of a micro-batch before it saved the buffer: plain autograd has only one graph at a time.
            assert begins and checkpoint != "always" and "modified by an inplace operation" in str(error)
            return
    assert all(map(torch.equal, given, expected))
    assert_same(model, plain)


def test_a_buffer_that_layers_do_not_change_has_one_copy_for_all_micro_batches() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(WIDTH))

        def forward(self, input: Tensor) -> Tensor:
            return input * self.mask

    with GPipe(nn.Sequential(linear(), Masked()), [2], chunks=4, checkpoint="always") as pipe:
        for _ in range(2):
            pipe.step(*batch(), functional.mse_loss)
        state = pipe._runner.partitions[0].state
        assert len(state._copies) == 1 and all(copy is not None for copy in state._copies.values())


class ParameterCount(nn.Module):
    at_step = 0

    def __init__(self, write: Callable[[nn.Module], object], begins: int) -> None:
        super().__init__()
        self.write, self.begins = write, begins
        self.count = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.at_step >= self.begins:
            self.write(self)
        return input + self.count.clone()


def replace_count(module: Any) -> None:
    module.count = nn.Parameter(module.count + 1, requires_grad=False)


def give_memory(module: Any) -> None:
    module.count.data = module.count.data + 1


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("write", [lambda module: module.count.add_(1), replace_count, give_memory])
def test_a_parameter_that_a_forward_writes_is_refused_under_checkpointing_and_counts_once_without(
    write: Callable[[nn.Module], object], begins: int
) -> None:
    """A frozen parameter that served as a counter counted twice."""
    layers = [linear(), ParameterCount(write, begins), linear()]
    compare(copy.deepcopy(layers), [2, 1], checkpoint="never")
    with (
        GPipe(nn.Sequential(*layers), [2, 1], chunks=2, checkpoint="always") as pipe,
        pytest.raises(
            RuntimeError,
            match=r"^layer '1' \(ParameterCount\) writes its parameter 'count' in its forward, and recompute "
            r"would write it again\. Make it a buffer, or use checkpoint='never'",
        ),
    ):
        pipe_steps(pipe, functional.mse_loss, 2)


def test_an_embedding_that_renormalizes_trains_without_checkpointing_and_is_refused_with() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Embedding(9, WIDTH, max_norm=0.5), linear()]

    tokens, target = torch.arange(8) % 5, torch.randn(8, WIDTH)
    plain = nn.Sequential(*layers())
    for part, wanted in zip(tokens.tensor_split(2), target.tensor_split(2), strict=True):
        (functional.mse_loss(plain(part), wanted) / 2).backward()
    with GPipe(nn.Sequential(*layers()), [1, 1], chunks=2, checkpoint="never") as pipe:
        pipe.step(tokens, target, functional.mse_loss)
        assert_same(pipe.module, plain)
        pipe.checkpoint = "always"
        with pytest.raises(RuntimeError, match=r"layer '0' \(Embedding\) writes its parameter 'weight'"):
            pipe.step(tokens, target, functional.mse_loss)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_failing_step_leaves_buffers_as_they_were(checkpoint: str) -> None:
    """The first failing step took the statistics of batch norm back, the second did not."""

    class Fails(nn.Module):
        fails = False

        def forward(self, input: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("now")
            return input * 1

    layers = [linear(), nn.BatchNorm1d(WIDTH), Count("replace", 0), Fails()]
    with GPipe(nn.Sequential(*layers), [3, 1], chunks=2, checkpoint=checkpoint) as pipe:
        for pipe[3].fails in (True, False, True, True):
            before = {name: (buffer, buffer.clone()) for name, buffer in pipe.named_buffers()}
            if pipe[3].fails:
                with pytest.raises(ValueError, match="now"):
                    pipe.step(*batch(), functional.mse_loss)
            else:
                pipe.step(*batch(), functional.mse_loss)
            for name, buffer in pipe.named_buffers():
                assert torch.equal(buffer, before[name][1]) == pipe[3].fails, name
                assert buffer is before[name][0] or not pipe[3].fails, name


def test_recompute_that_returns_other_tensors_is_refused() -> None:
    class Forgetful(nn.Module):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return input * 1 if self.calls % 2 else input.detach()

    model = nn.Sequential(linear(), Forgetful(), linear())
    with (
        GPipe(model, [2, 1], checkpoint="always") as pipe,
        pytest.raises(
            RuntimeError,
            match=r"^partition 0 \(layers '0' \(Linear\) to '1' \(Forgetful\)\) did something else in recompute",
        ),
    ):
        pipe.step(*batch(), functional.mse_loss)


# What partitions share.


def sharing_layers(module: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [linear(), Holder(module), linear(), Holder(module)]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(WIDTH, affine=False),
        *(functools.partial(Count, how, 0) for how in ("add", "data", "replace")),
    ],
)
def test_a_module_with_state_works_within_one_partition_and_is_refused_across_partitions(
    make: Callable[[], nn.Module], checkpoint: str
) -> None:
    """A batch norm that two partitions held gave 9 different means in 40 identical runs."""
    compare(sharing_layers(make()), [4], checkpoint=checkpoint)
    for balance in ([2, 2], [1, 1, 1, 1]):
        with GPipe(nn.Sequential(*sharing_layers(make())), balance, chunks=4, checkpoint=checkpoint) as pipe:
            for _ in range(2):
                with pytest.raises(
                    RuntimeError,
                    match=r"^layer '[13]' \(Holder\) changes the buffer '\w+' in its forward, and another partition "
                    r"holds it too.*Put the layers that share it into one partition, or do not share it",
                ):
                    pipe.step(*batch(), functional.mse_loss)
            pipe.eval()
            enter_step(pipe, -1)
            pipe(batch()[0]).sum().backward()  # nothing changes: it works


def test_a_buffer_that_two_layers_register_works_within_one_partition_and_is_refused_across() -> None:
    """One of two layers overwrote what the other had counted, even in one partition."""

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        first, second = Count("add", 0), Count("add", 0)
        second.count = first.count
        return [linear(), first, second, linear()]

    for checkpoint in ("never", "always"):
        compare(layers(), [4], checkpoint=checkpoint)
        compare(layers(), [3, 1], checkpoint=checkpoint)
        with (
            GPipe(nn.Sequential(*layers()), [2, 2], checkpoint=checkpoint) as pipe,
            pytest.raises(
                RuntimeError,
                match=r"changes the buffer .count. in its forward, and another partition holds it too",
            ),
        ):
            pipe.step(*batch(), functional.mse_loss)


def test_a_parameter_that_partitions_share_may_be_read_and_not_written() -> None:
    for write in (lambda module: module.count.add_(1), replace_count):
        for checkpoint in ("never", "always"):
            shared = ParameterCount(write, begins=1)
            with GPipe(nn.Sequential(*sharing_layers(shared)), [2, 2], checkpoint=checkpoint) as pipe:
                pipe.step(*batch(), functional.mse_loss)
                with pytest.raises(
                    RuntimeError, match=r"'count'.* in its forward, and (another|other layers) "
                ):
                    enter_step(pipe, 1)
                    pipe.step(*batch(), functional.mse_loss)


# Memory that crosses a boundary under two names.


def imaginary(input: Tensor) -> Tensor:
    return torch.complex(input, input * 0.5)


WRITERS: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "conjugates": (
        lambda: [Do(lambda x: (z := imaginary(x), z.conj())), Do(lambda v: (v[0] + v[1].mul_(2)).abs())],
        "layer '2' (Do)",
    ),
    "a real part": (
        lambda: [Do(lambda x: (z := imaginary(x), z.real)), Do(lambda v: (v[0] + v[1].mul_(2)).abs())],
        "layer '2' (Do)",
    ),
    "a transposed view": (
        lambda: [Do(lambda x: x.t().contiguous().t()), Do(lambda x: x.add_(0.25))],
        "layer '2' (Do)",
    ),
    "a view": (lambda: [Do(lambda x: x.view(-1, WIDTH)), Do(lambda x: x.add_(0.25))], "layer '2' (Do)"),
    "a slice": (lambda: [Do(lambda x: x[:]), Do(lambda x: x.add_(0.25))], "layer '2' (Do)"),
    "a buffer": (lambda: [Hands(), Do(lambda pair: pair[0] * pair[1].add_(1))], "layer '2' (Do)"),
    "a skip": (lambda: [Stash(), nn.ReLU(inplace=True), Pop()], "layer '2' (ReLU)"),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("kind", WRITERS)
def test_memory_that_crosses_a_boundary_may_be_read_and_not_written(kind: str, checkpoint: str) -> None:
    """A written view, a conjugate or a handed buffer gave wrong values and gradients; test_same_bits.py reads them."""
    make, layer = WRITERS[kind]
    with (
        GPipe(
            nn.Sequential(linear(), *make(), linear()),
            [2, 2 if kind != "a skip" else 3],
            checkpoint=checkpoint,
        ) as pipe,
        pytest.raises(
            RuntimeError,
            match=f"^{re.escape(layer)} writes in place a tensor whose memory also belongs to another one",
        ),
    ):
        pipe.step(*batch(), functional.mse_loss)


def test_a_skip_that_is_written_after_its_stash_does_not_cross() -> None:
    model = nn.Sequential(linear(), Stash(), nn.ReLU(inplace=True), nn.Tanh(), Pop())
    with (
        GPipe(model, [3, 1, 1]) as pipe,
        pytest.raises(RuntimeError, match=r"^partition 0 writes in place a tensor"),
    ):
        pipe.step(*batch(), functional.mse_loss)


def test_a_tensor_that_a_layer_kept_is_refused_in_the_step_in_which_it_leaks() -> None:
    """Only the first step looked for graphs that reach around a boundary."""

    class Keeps(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            kept.append(super().forward(input))
            return kept[-1]

    class Uses(nn.Linear):
        at_step = 0

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + (kept[-1] if self.at_step else 0)

    kept: list[Tensor] = []
    model = nn.Sequential(Keeps(WIDTH, WIDTH), nn.Tanh(), Uses(WIDTH, WIDTH))
    for checkpoint in ("never", "always"):
        with GPipe(model, [2, 1], checkpoint=checkpoint) as pipe:
            enter_step(pipe, 0)
            pipe.step(*batch(), functional.mse_loss)
            enter_step(pipe, 1)
            with pytest.raises(RuntimeError, match=r"^layer '2' \(Uses\) used a tensor of another partition"):
                pipe.step(*batch(), functional.mse_loss)


# Losses.


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), functools.partial(functional.mse_loss, reduction="sum")]
)
def test_a_sum_is_added_up_or_refused(loss: Callable[..., Tensor], checkpoint: str) -> None:
    """`step` divided the gradients of a sum by the number of micro-batches, without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    plain = copy.deepcopy(model)
    expected = plain_steps(plain, loss, 1, 4, weighted=False)
    with GPipe(model, [2, 1], chunks=4, checkpoint=checkpoint) as pipe:
        with pytest.raises(
            ValueError,
            match=r"^the loss has reduction='sum', but step takes it for the mean of a micro-batch; "
            r"call step with reduction='sum'$",
        ):
            pipe.step(*batch(), loss)
        assert pipe_steps(pipe, loss, 1, reduction="sum") == expected
    assert_same(model, plain)
    whole = copy.deepcopy(plain)
    whole.zero_grad()
    loss(whole(batch()[0]), batch()[1]).backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_other_reductions_are_refused() -> None:
    with GPipe(nn.Sequential(linear()), [1]) as pipe:
        with pytest.raises(ValueError, match=r"reduction='none'.*; use a loss that gives one number"):
            pipe.step(*batch(), nn.MSELoss(reduction="none"))
        with pytest.raises(
            ValueError, match=r"reduction='mean', but step takes it for the sum.*reduction='mean'"
        ):
            pipe.step(*batch(), nn.MSELoss(), reduction="sum")
        with pytest.raises(ValueError, match=r"^reduction must be 'mean' or 'sum', got 'batchmean'$"):
            pipe.step(*batch(), nn.MSELoss(), reduction="batchmean")


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25, 1.5])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2),
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
        functional.cross_entropy,
        functools.partial(functional.cross_entropy, weight=WEIGHT, ignore_index=1),
        nn.KLDivLoss(reduction="batchmean"),
    ],
    ids=range(6),
)
def test_the_mean_of_classes_is_the_mean_of_the_whole_mini_batch(loss: Callable[..., Tensor]) -> None:
    """Ignored and weighted classes count per micro-batch in torch's mean; rows alone weighed the micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    input = torch.randn(9, WIDTH).double()
    target = torch.tensor([0, 1, 2, 3, -100, -100, 5, 2, -100])
    if isinstance(loss, nn.KLDivLoss):
        target = torch.rand(9, WIDTH).double()
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    if isinstance(loss, functools.partial):
        loss = functools.partial(loss.func, **(loss.keywords | {"weight": WEIGHT.double()}))
    if getattr(loss, "ignore_index", -100) == 2 or isinstance(loss, functools.partial):
        target = target.clamp(min=0)
    plain = copy.deepcopy(model)
    expected = loss(plain(input), target)
    expected.backward()
    with GPipe(model, [2, 1], chunks=4) as pipe:
        torch.testing.assert_close(pipe.step(input, target, loss), expected.detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(output, target) * (1 + self.calls.clone())


@pytest.mark.parametrize("form", ["module", "method", "closure", "partial"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_recompute_does_not_change_the_buffers_of_a_loss(form: str, checkpoint: str) -> None:
    """A loss was called 12, 9 or 6 times under the three modes, and its gradients differed."""

    def forms(counting: CountingLoss) -> Callable[..., Tensor]:
        return {
            "module": counting,
            "method": counting.forward,
            "closure": lambda output, target: counting(output, target) * 2,
            "partial": functools.partial(counting),
        }[form]

    torch.manual_seed(0)
    model = nn.Sequential(linear(), linear())
    plain, mine, theirs = copy.deepcopy(model), CountingLoss(), CountingLoss()
    expected = plain_steps(plain, forms(theirs), 2, 3)
    with GPipe(model, [1, 1], chunks=3, checkpoint=checkpoint) as pipe:
        assert all(map(torch.equal, pipe_steps(pipe, forms(mine), 2), expected))
    assert mine.calls == theirs.calls == 6
    assert_same(model, plain)


# A backward in two halves.


def test_a_graph_that_can_run_in_halves_still_does() -> None:
    model = nn.Sequential(linear(), linear())
    with GPipe(model, [1, 1], schedule="zero_bubble", checkpoint="never") as pipe:
        partition = pipe._runner.partitions[1]
        split: list[bool] = []
        original = type(partition).backward_weights

        def spy(self: Any, saved: Any, *, keep_graph: bool) -> None:
            split.append(saved.split is not None)
            original(self, saved, keep_graph=keep_graph)

        type(partition).backward_weights = spy  # type: ignore[method-assign]
        try:
            pipe.step(*batch(), functional.mse_loss)
        finally:
            type(partition).backward_weights = original  # type: ignore[method-assign]
    assert split == [True, True]


@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipe_may_be_a_layer_of_a_pipe(schedule: str, inner: str) -> None:
    """Under zero_bubble the parameters of the inner pipe got twice their gradients."""
    torch.manual_seed(0)
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    rest = linear()
    plain = nn.Sequential(*copy.deepcopy([block, rest]))
    expected = plain_steps(plain, functional.mse_loss, 2, 2)
    with GPipe(block, [1, 2], checkpoint=inner) as layer:
        for checkpoint in CHECKPOINTS:
            model = nn.Sequential(layer, rest)
            model.zero_grad()
            with GPipe(model, [1, 1], chunks=2, schedule=schedule, checkpoint=checkpoint) as pipe:
                assert all(map(torch.equal, pipe_steps(pipe, functional.mse_loss, 2), expected))
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


def test_a_reentrant_checkpoint_works_beside_a_parameter_with_a_hook() -> None:
    """Collecting the gradients of hooked parameters used autograd.grad, with which torch's checkpoint does not work."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), Reentrant(), linear())
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each[0].weight.register_hook(lambda gradient: gradient * 3)
    with GPipe(model, [1, 2], chunks=1) as pipe:
        pipe(batch()[0]).square().sum().backward()
    plain(batch()[0]).square().sum().backward()
    assert_same(model, plain)


# What cannot work.


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_and_transforms_are_refused() -> None:
    input = batch()[0]
    with GPipe(nn.Sequential(linear(), nn.Tanh()), [1, 1], chunks=2) as pipe:
        for grad in (False, True):
            with (
                torch.set_grad_enabled(grad),
                forward_ad.dual_level(),
                pytest.raises(RuntimeError, match=r"^forward-mode AD does not go through a pipe"),
            ):
                pipe(forward_ad.make_dual(input, torch.ones_like(input)))
        for transformed in (torch.func.vmap(pipe), torch.func.jacrev(pipe)):
            with pytest.raises(RuntimeError, match=r"^a transform of torch\.func does not go through a pipe"):
                transformed(input[None])
        pipe(input)


def test_a_sparse_tensor_across_a_boundary_is_refused_and_works_within_a_partition() -> None:
    layers = [linear(), Do(Tensor.to_sparse), Do(Tensor.to_dense)]
    compare(layers, [3])
    with GPipe(nn.Sequential(*layers), [2, 1]) as pipe:
        with pytest.raises(
            TypeError,
            match=r"^a tensor with layout torch\.sparse_coo cannot cross .* Call to_dense\(\) on it in the",
        ):
            pipe.step(*batch(), functional.mse_loss)
        with pytest.raises(
            TypeError, match=r"^input has layout torch\.sparse_coo or is nested, and cannot be split"
        ):
            pipe(batch()[0].to_sparse())


def test_the_pipe_without_partitions_is_the_plain_sequence_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), Count("data", 1), nn.Tanh())
    plain = copy.deepcopy(model)
    expected = plain_steps(plain, functional.mse_loss, 3, 4)
    assert all(map(torch.equal, pipe_steps(plain_pipe(model, chunks=4), functional.mse_loss, 3), expected))
    assert_same(model, plain)
