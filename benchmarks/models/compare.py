"""Compare a traced model with the original: names, ties, outputs, gradients, buffers and random numbers, to the bit."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn

from benchmarks.models.subject import Batch, Batches, Subject, call
from gpipe_cli import GPipe
from gpipe_cli.sequential import LayerSequence, partition_uniform, to_sequential

DROPOUT = 0.1
PARTITIONS = 3
CHUNKS = 2
TOLERANCE = 1e-12
"""For gradients of parameters that several layers share, in float64: their parts are added in another order."""


class Different(AssertionError):
    """The traced model differs from the original."""


@final
@dataclass(frozen=True)
class Proof:
    layers: int
    shared: int
    """Parameters that several layers share."""
    checkpoint: str
    """The mode of the pipe: "never" if torch itself computes other bits without a graph, as recomputation needs."""
    trace_seconds: float
    """CPU time of tracing with the first sample, so that other processes do not count."""
    seconds: float
    gigabytes: float
    """Peak memory of the process."""


@final
@dataclass(frozen=True)
class _Facts:
    """Everything that one training pass leaves behind."""

    output: Any
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    random_state: Tensor


def prove(subject: Subject) -> Proof:
    """Raise Different unless the traced model equals the original: alone with dropout, and in a pipe without."""
    began = time.perf_counter()
    torch.manual_seed(0)
    kinds = subject.batches()
    traced = [_prove_alone(subject, batches) for batches in kinds]
    dtype = torch.float64 if any(proof.shared for proof in traced) else torch.float32
    checkpoints = [prove_in_a_pipe(subject, batches, dtype, _with_full_masks(batches)) for batches in kinds]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = time.perf_counter() - began
    return replace(traced[0], checkpoint=checkpoints[0], seconds=seconds, gigabytes=memory)


def _prove_alone(subject: Subject, batches: Batches) -> Proof:
    original = subject.build(DROPOUT)
    trace_began = time.process_time()
    sequence = to_sequential(original, batches.sample)
    trace_seconds = time.process_time() - trace_began
    _require(len(sequence) >= subject.least_layers, f"{len(sequence)} layers, not {subject.least_layers}")
    for what, batch in batches.others.items():
        with torch.no_grad():
            expected = call(original.eval(), batch)
            _compare_outputs(sequence.eval()(batch), expected, f"{what}, in evaluation")
        # In training, batch norm does not accept a single sample.
        if _rows(batch) > 1 and what not in _with_full_masks(batches):
            _compare_training(original, sequence, batch, f"{what}, in training")
    return Proof(len(sequence), len(_shared(sequence)), "never", trace_seconds, 0.0, 0.0)


def _compare_names(original: nn.Module, sequence: LayerSequence) -> None:
    _require(list(sequence.state_dict()) == list(original.state_dict()), "state_dict has other names")
    for members in ("named_parameters", "named_buffers"):
        for once in (True, False):
            expected, given = (
                {name: id(tensor) for name, tensor in getattr(model, members)(remove_duplicate=once)}
                for model in (original, sequence)
            )
            _require(list(given) == list(expected), f"{members} has other names")
            _require(given == expected, f"{members} has other tensors")
    for model, other in ((sequence, original), (original, sequence)):
        model.load_state_dict(other.state_dict())


def _compare_training(original: nn.Module, sequence: LayerSequence, batch: Batch, what: str) -> None:
    def run(module: nn.Module, output_of: Callable[[], Any]) -> _Facts:
        module.train()

        def forward_backward() -> Any:
            output = output_of()
            _loss(output).backward()
            return output

        return _facts(original, forward_backward)

    expected = run(original, lambda: call(original, batch))
    given = run(sequence, lambda: sequence(batch))
    _compare_outputs(given.output, expected.output, what)
    _compare_facts(given, expected, frozenset(), what)
    _require(torch.equal(given.random_state, expected.random_state), f"{what}: other random numbers")


def _with_full_masks(batches: Batches) -> dict[str, Batch]:
    """Batches with a mask but without padding, for which models skip the mask that a traced model applies.

    Only without dropout does torch's attention compute the same bits with a mask of ones as without a mask.
    """
    return {
        what: batch
        for what, batch in batches.others.items()
        if isinstance(batch, dict) and "attention_mask" in batch and batch["attention_mask"].all()
    }


def prove_in_a_pipe(
    subject: Subject,
    batches: Batches,
    dtype: torch.dtype = torch.float32,
    alone: Mapping[str, Batch] = MappingProxyType({}),
) -> str:
    """Compare a training step in partitions with the original's own micro-batches; return the checkpoint mode.

    alone: batches to compare outside of a pipe as well, without dropout.
    """
    original = subject.build(0.0).to(dtype).train()
    sample, batch = _to(batches.sample, dtype), _to(batches.step, dtype)
    sequence = to_sequential(original, sample)
    _compare_names(original, sequence)
    for what, other in alone.items():
        _compare_training(original, sequence, other, f"{what}, in training without dropout")
    balance = [len(part) for part in partition_uniform(sequence, PARTITIONS)]
    expected = _facts(original, lambda: _step(original, batch))
    checkpoint = "always" if _has_the_same_bits_without_a_graph(original, batch) else "never"
    with GPipe(sequence, balance, devices=["cpu"] * PARTITIONS, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
        given = _facts(original, lambda: pipe.train().step(batch, torch.zeros(_rows(batch)), _loss))
    what = f"a step in {PARTITIONS} partitions"
    _require(not expected.output.isnan(), f"{what}: the loss is NaN, so nothing is compared")
    _require(torch.equal(given.output, expected.output), f"{what}: the loss differs")
    _compare_facts(given, expected, _shared(sequence), what)
    return checkpoint


def _has_the_same_bits_without_a_graph(original: nn.Module, batch: Batch) -> bool:
    """False for some attention: with a trained bias, torch uses another kernel if no gradient is needed."""
    micro_batch = _split(batch)[0]
    with_graph = _facts(original, lambda: call(original, micro_batch)).output
    with torch.no_grad():
        without_graph = _facts(original, lambda: call(original, micro_batch)).output
    pairs = zip(_tensors(with_graph), _tensors(without_graph), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


def _step(original: nn.Module, batch: Batch) -> Tensor:
    losses = []
    for micro_batch in _split(batch):
        loss = _loss(call(original, micro_batch)) / CHUNKS
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _facts(original: nn.Module, run: Callable[[], Any]) -> _Facts:
    """What `run` leaves behind, from the same random state each time; afterwards the buffers are as before."""
    # The sequence and the pipe have the original's own parameters and buffers, so that the largest fit into memory.
    buffers_before = {name: buffer.clone() for name, buffer in original.named_buffers()}
    original.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    output = run()
    facts = _Facts(
        output,
        {name: parameter.grad for name, parameter in original.named_parameters()},
        {name: buffer.clone() for name, buffer in original.named_buffers()},
        torch.get_rng_state(),
    )
    original.zero_grad(set_to_none=True)
    for name, buffer in original.named_buffers():
        buffer.copy_(buffers_before[name])
    return facts


def _compare_outputs(given: Any, expected: Any, what: str) -> None:
    _require(not any(tensor.isnan().any() for tensor in _tensors(expected)), f"{what}: the output has NaN")
    _require(type(given) is type(expected), f"{what}: {type(given).__name__}, not {type(expected).__name__}")
    if isinstance(expected, dict):
        _require(list(given) == list(expected), f"{what}: has {list(given)}, not {list(expected)}")
    for one, other in zip(_tensors(given), _tensors(expected), strict=True):
        _require(one.shape == other.shape, f"{what}: shape {tuple(one.shape)}, not {tuple(other.shape)}")
        _require(torch.equal(one, other), f"{what}: outputs differ by up to {_distance(one, other):.1e}")


def _compare_facts(given: _Facts, expected: _Facts, tolerated: frozenset[str], what: str) -> None:
    """tolerated: names of parameters whose gradients may differ by TOLERANCE."""
    for name, gradient in expected.gradients.items():
        other = given.gradients[name]
        if gradient is None or other is None:
            _require(gradient is other, f"{what}: only one has a gradient of {name}")
        elif not torch.equal(gradient, other):
            distance = _distance(other, gradient)
            is_close = name in tolerated and distance <= TOLERANCE
            _require(is_close, f"{what}: the gradient of {name} differs by {distance:.1e}")
    for name, buffer in expected.buffers.items():
        _require(torch.equal(buffer, given.buffers[name]), f"{what}: {name} differs afterwards")


def _shared(sequence: LayerSequence) -> frozenset[str]:
    """The names of parameters that several layers hold."""
    holders = Counter(id(parameter) for layer in sequence for parameter in layer.parameters())
    return frozenset(name for name, parameter in sequence.named_parameters() if holders[id(parameter)] > 1)


def _loss(output: Any, _target: Any = None) -> Tensor:
    return sum((tensor.square().mean() for tensor in _tensors(output)), torch.zeros(()))


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((one - other).abs().max() / other.abs().max()).item()


def _rows(batch: Batch) -> int:
    return len(next(_tensors(batch)))


def _split(batch: Batch) -> list[Batch]:
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(CHUNKS))
    parts = zip(*(tensor.tensor_split(CHUNKS) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def _to(batch: Batch, dtype: torch.dtype) -> Batch:
    return batch.to(dtype) if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors(member)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Different(what)
