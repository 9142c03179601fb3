"""`python -m benchmarks.tracing [name ...]`: does a traced torchvision model equal the original, to the bit?

Each model is checked in a process of its own, one after the other: the largest need 8 GB. Each line shows a model's cut
points, the seconds it took to trace and to check, and its memory; the last lines are the totals. The tests also use
`prove`, for the smallest model of each family.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from rich.console import Console
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.models import torchvision_zoo
from gpipe_cli.sequential import partition_uniform, to_sequential
from gpipe_cli.vision import torchvision

TASKS = ("classification", "segmentation", "video")
SMALLEST_SHAPES = {
    "inception_v3": (3, 299, 299),
    "maxvit_t": (3, 224, 224),
    "vit_h_14": (3, 56, 56),
    "mvit_v1_b": (3, 16, 224, 224),
    "mvit_v2_s": (3, 16, 224, 224),
    "s3d": (3, 16, 224, 224),
}
"""Input shapes of models that do not accept 64x64 images or clips of four 32x32 frames."""
LEAST_CUTS = 8
SECONDS_TO_TRACE = 3.0


class Different(AssertionError):
    """The traced model differs from the original."""


@final
@dataclass(frozen=True)
class Proof:
    cuts: int
    trace_seconds: float
    seconds: float
    gigabytes: float
    """Peak memory of the process."""


def smallest_shape(name: str) -> tuple[int, ...]:
    is_video = name in torchvision_zoo.names("video")
    return SMALLEST_SHAPES.get(name, (3, 4, 32, 32) if is_video else (3, 64, 64))


def original_of(name: str, shape: tuple[int, ...]) -> nn.Module:
    model = torchvision.models.get_model(
        name, weights=None, num_classes=5, **torchvision_zoo.options(name, shape)
    )
    assert isinstance(model, nn.Module)
    return model


def prove(name: str) -> Proof:
    """Raise Different unless outputs, gradients, buffers and names equal the original's, alone and in a pipe."""
    began = time.perf_counter()
    torch.manual_seed(0)
    shape = smallest_shape(name)
    original, input = _without_chance(original_of(name, shape)), torch.randn(2, *shape)
    trace_began = time.process_time()  # CPU time, so that other processes do not count
    sequence = to_sequential(original, input)
    traced = time.process_time()
    _require(len(sequence) > LEAST_CUTS, f"only {len(sequence) - 1} cuts")
    _compare_names(original, sequence)
    balance = [len(part) for part in partition_uniform(sequence, 3)]
    with GPipe(sequence, balance, devices=["cpu"] * 3, checkpoint="always") as pipe:
        _compare_evaluation(original, (sequence, pipe), input)
        _compare_training(original, (sequence, pipe), input)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ended = time.perf_counter()
    return Proof(len(sequence) - 1, traced - trace_began, ended - began, memory)


def _without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for attribute in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def _compare_names(original: nn.Module, sequence: nn.Module) -> None:
    _require(list(sequence.state_dict()) == list(original.state_dict()), "state_dict names differ")
    of_original, of_sequence = (
        [key for key, _ in model.named_parameters()] for model in (original, sequence)
    )
    _require(of_sequence == of_original, "parameter names differ")
    for model, other in ((sequence, original), (original, sequence)):
        model.load_state_dict(other.state_dict())


@torch.no_grad()
def _compare_evaluation(original: nn.Module, others: Sequence[nn.Module], input: Tensor) -> None:
    expected = original.eval()(input)
    for other in others:
        _require_equal(other.eval()(input), expected, "outputs in evaluation")


def _compare_training(original: nn.Module, others: Sequence[nn.Module], input: Tensor) -> None:
    # The others have the original's own parameters and buffers, so that the largest fit into memory.
    before = {name: buffer.clone() for name, buffer in original.named_buffers()}
    expected = _backward(original.train(), input)
    gradients = {name: parameter.grad for name, parameter in original.named_parameters()}
    after = {name: buffer.clone() for name, buffer in original.named_buffers()}
    for other in others:
        original.zero_grad()
        for name, buffer in original.named_buffers():
            buffer.copy_(before[name])
        _require_equal(_backward(other.train(), input), expected, "outputs in training")
        for name, parameter in original.named_parameters():
            _require_equal(parameter.grad, gradients[name], f"the gradient of {name}")
        for name, buffer in original.named_buffers():
            _require_equal(buffer, after[name], f"after a step {name}")


def _backward(model: nn.Module, input: Tensor) -> Any:
    output = model(input)
    torch.autograd.backward([tensor.square().sum() for tensor in _tensors(output)])
    return output


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        yield from value.values() if isinstance(value, dict) else value


def _require_equal(given: Any, expected: Any, what: str) -> None:
    if given is None or expected is None:
        _require(given is expected, f"{what}: one is None")
        return
    if isinstance(expected, dict):
        _require(list(given) == list(expected), f"{what}: names differ")
    pairs = zip(_tensors(given), _tensors(expected), strict=True)
    _require(all(torch.equal(*pair) for pair in pairs), f"{what}: bits differ")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Different(what)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="models; by default all of classification, segmentation, video"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        torch.set_num_threads(1)  # with more, some of torch's own gradients differ from run to run
        sys.stdout.write(json.dumps(asdict(prove(options.names[0]))))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{'model':<30} {'cuts':>5} {'trace s':>8} {'all s':>7} {'GB':>5}")
    chosen = {task: torchvision_zoo.names(task) for task in TASKS}
    if options.names:
        chosen = {task: [name for name in names if name in options.names] for task, names in chosen.items()}
    proved = {task: [_proved_apart(name, console) for name in names] for task, names in chosen.items()}
    for task, results in proved.items():
        if results:
            console.print(f"{task}: {sum(results)} of {len(results)} to the bit")
    return 0 if all(all(results) for results in proved.values()) else 1


def _proved_apart(name: str, console: Console) -> bool:
    command = [sys.executable, "-m", "benchmarks.tracing", "--here", name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        console.print(f"{name:<30} failed: {error_lines[-1]}")
        return False
    proof = Proof(**json.loads(process.stdout))
    slow = "  slow to trace" if proof.trace_seconds > SECONDS_TO_TRACE else ""
    figures = f"{proof.cuts:>5} {proof.trace_seconds:>8.2f} {proof.seconds:>7.1f} {proof.gigabytes:>5.1f}"
    console.print(f"{name:<30} {figures}{slow}")
    return True


if __name__ == "__main__":
    sys.exit(main())
