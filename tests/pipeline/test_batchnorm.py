"""Deferred batch norm against nn.BatchNorm on the whole mini-batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_cli.pipeline.batchnorm import (
    DeferredBatchNorm,
    commit_or_discard,
    convert_deferred_batch_norm,
    deferred_batch_norms,
)
from gpipe_cli.pipeline.context import MicroBatch, Running

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (3, 2), nn.BatchNorm3d: (2, 2, 2)}


def deferred(original: nn.Module) -> nn.Module:
    return convert_deferred_batch_norm(copy.deepcopy(original))


def commit(module: nn.Module) -> None:
    with commit_or_discard(list(deferred_batch_norms(module))):
        pass


def run(layer: nn.Module, batch: Tensor, sizes: list[int]) -> Tensor:
    output = torch.cat([layer(micro_batch) for micro_batch in batch.split(sizes)])
    commit(layer)
    return output


def assert_same_buffers(left: nn.Module, right: nn.Module, *, relative: float = 1e-12) -> None:
    assert left.state_dict().keys() == right.state_dict().keys()
    for (name, actual), expected in zip(left.named_buffers(), right.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=relative, atol=1e-12, msg=name)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(sorted(SHAPES, key=str)),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=5),
    momentum=st.sampled_from([None, 0.1, 0.9]),
    mean=st.sampled_from([0.0, -1e2, 1e4]),
    affine=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_running_statistics_are_those_of_the_whole_mini_batch(
    kind: type[nn.BatchNorm2d],
    sizes: list[int],
    momentum: float | None,
    mean: float,
    affine: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = kind(4, momentum=momentum, affine=affine, dtype=torch.float64)
    parts = deferred(whole)
    for _ in range(3):
        shape = (sum(sizes), 4, *SHAPES[kind])
        batch = mean + torch.randn(shape, generator=generator, dtype=torch.float64)
        whole(batch)
        run(parts, batch, sizes)
        # The squares of values near 1e4 lose eight digits, but only in a sum of squares.
        assert_same_buffers(parts, whole, relative=1e-12 if abs(mean) < 1e3 else 1e-10)


def test_output_and_gradients_are_to_the_bit_those_of_batch_norm_on_each_micro_batch() -> None:
    plain = nn.BatchNorm2d(3)
    parts = deferred(plain)
    batch = torch.randn(8, 3, 4, 4)
    left, right = batch.clone().requires_grad_(), batch.clone().requires_grad_()
    expected, output = run(plain, left, [3, 3, 2]), run(parts, right, [3, 3, 2])
    assert torch.equal(output, expected)
    for result in (expected, output):
        result.square().sum().backward()
    assert torch.equal(right.grad, left.grad)
    for actual, expected in zip(parts.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


def test_the_variance_survives_a_mean_of_ten_thousand_in_single_precision() -> None:
    """torchgpipe summed squares: a true variance of 1.03 came out as 0."""
    parts = deferred(nn.BatchNorm1d(2, momentum=1.0))
    batch = 1e4 + torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    run(parts, batch, [8] * 8)
    torch.testing.assert_close(parts.running_var, batch.double().var(0).float(), rtol=1e-3, atol=0)


def test_a_mini_batch_with_fewer_micro_batches_than_the_last_is_committed_by_itself() -> None:
    """torchgpipe counted to `chunks`: a short mini-batch waited for the next and mixed with it."""
    whole = nn.BatchNorm1d(2, dtype=torch.float64)
    parts = deferred(whole)
    for sizes in ([2, 2, 2, 2], [2, 2], [3]):
        batch = torch.randn(sum(sizes), 2, dtype=torch.float64)
        whole(batch)
        run(parts, batch, sizes)
        assert_same_buffers(parts, whole)
    assert parts.num_batches_tracked == 3


def test_recomputation_changes_no_statistics_and_repeats_the_output() -> None:
    parts = deferred(nn.BatchNorm1d(2))
    batch = torch.randn(4, 2)
    output = parts(batch)
    with Running(MicroBatch(0, 4), recomputing=True):
        assert torch.equal(parts(batch), output)
    commit(parts)
    whole = nn.BatchNorm1d(2)
    whole(batch)
    assert_same_buffers(parts, whole, relative=1e-6)


def test_nothing_reaches_the_buffers_before_the_commit_nor_after_a_discard() -> None:
    parts = deferred(nn.Sequential(nn.BatchNorm1d(2)))
    before = copy.deepcopy(parts.state_dict())
    batch_norms = list(deferred_batch_norms(parts))
    with pytest.raises(ZeroDivisionError), commit_or_discard(batch_norms):
        parts(torch.randn(4, 2))
        _ = 1 / 0
    commit(parts)
    for name, value in parts.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_neither_buffers_nor_what_waits_for_the_commit_hold_a_graph() -> None:
    parts = deferred(nn.BatchNorm1d(2))
    parts(torch.randn(4, 2, requires_grad=True) * 2)
    parts(torch.randn(4, 2, requires_grad=True) * 2)
    pending = parts.pending
    assert not pending.mean.requires_grad
    assert not pending.deviation.requires_grad
    commit(parts)
    assert not any(buffer.requires_grad for buffer in parts.buffers())


def test_evaluation_is_plain_batch_norm() -> None:
    whole = nn.BatchNorm2d(3)
    whole(torch.randn(8, 3, 2, 2))
    parts = deferred(whole.eval())
    batch = torch.randn(4, 3, 2, 2)
    assert torch.equal(parts(batch), whole(batch))
    commit(parts)
    assert_same_buffers(parts, whole)


def test_conversion_keeps_names_parameters_buffers_and_mode() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())).eval()
    before = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    names = list(model.state_dict())
    assert convert_deferred_batch_norm(model) is model
    after = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    assert list(model.state_dict()) == names
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert isinstance(model[1][0], DeferredBatchNorm)
    assert not model[1][0].training


def test_state_dicts_go_both_ways_between_deferred_and_plain() -> None:
    whole = nn.BatchNorm2d(3)
    parts = deferred(nn.BatchNorm2d(3))
    whole(torch.randn(8, 3, 2, 2))
    parts.load_state_dict(whole.state_dict())
    assert_same_buffers(parts, whole)
    run(parts, torch.randn(8, 3, 2, 2), [4, 4])
    whole.load_state_dict(parts.state_dict())
    assert_same_buffers(parts, whole)


def test_converting_twice_changes_nothing() -> None:
    model = deferred(nn.Sequential(nn.BatchNorm1d(2)))
    layer = model[0]
    assert convert_deferred_batch_norm(model)[0] is layer


def test_a_layer_used_at_two_places_stays_one() -> None:
    shared = nn.BatchNorm1d(2)
    model = convert_deferred_batch_norm(nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)))
    assert isinstance(model[0], DeferredBatchNorm)
    assert model[2][0] is model[0]


def test_a_batch_norm_without_running_statistics_is_left_alone() -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False)
    assert convert_deferred_batch_norm(layer) is layer


def test_half_precision_merges_in_single_precision() -> None:
    parts = deferred(nn.BatchNorm1d(2, dtype=torch.bfloat16))
    parts(torch.randn(8, 2, dtype=torch.bfloat16))
    assert parts.pending.mean.dtype == torch.float32
    commit(parts)
    assert parts.running_mean.dtype == torch.bfloat16


def test_a_batch_norm_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Mine(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return input

    with pytest.raises(TypeError, match=r"Mine has a forward of its own, .* deferred_batch_norm=False"):
        convert_deferred_batch_norm(nn.Sequential(Mine(2)))


def test_an_input_of_wrong_dimensions_is_refused_as_in_torch() -> None:
    with pytest.raises(ValueError, match=r"expected 4D input \(got 2D input\)"):
        deferred(nn.BatchNorm2d(2))(torch.randn(4, 2))


def test_one_value_per_channel_is_refused_as_in_torch_and_not_remembered() -> None:
    parts = deferred(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        parts(torch.randn(1, 2))
    commit(parts)
    assert parts.num_batches_tracked == 0
