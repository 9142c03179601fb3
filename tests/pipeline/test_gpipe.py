"""The face of a pipe: what it is given, what it refuses, what it looks like."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gpipe_cli
from gpipe_cli import GPipe
from gpipe_cli.balance import balance_by_params
from gpipe_cli.sequential import LayerSequence, listed_layers


def three_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def test_the_public_names_come_from_the_package() -> None:
    assert {"GPipe", "current_microbatch", "is_checkpointing", "is_recomputing"} <= set(dir(gpipe_cli))
    assert callable(gpipe_cli.register_layer_logging_hooks)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = gpipe_cli.no_such_name


def test_what_it_was_given_is_there_as_attributes() -> None:
    pipe = GPipe(three_layers(), balance=(1, 2), chunks="4", checkpoint="always", devices=["cpu"] * 2)
    assert pipe.balance == [1, 2]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert (pipe.chunks, pipe.checkpoint, pipe.schedule) == (4, "always", "gpipe")
    assert [len(partition) for partition in pipe.partitions] == [1, 2]
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert isinstance(pipe.partitions[0], nn.Sequential)
    assert [name for name, _ in pipe.partitions[1].named_children()] == ["1", "2"]


def test_it_is_indexable_and_iterable_like_the_sequence() -> None:
    layers = list(three_layers())
    pipe = GPipe(nn.Sequential(*layers), [2, 1])
    assert len(pipe) == 3
    assert list(pipe) == layers
    assert pipe[0] is layers[0]
    assert pipe[-1] is layers[2]
    with pytest.raises(IndexError):
        pipe[3]


def test_without_devices_and_gpu_each_partition_gets_a_cpu_worker() -> None:
    if not torch.cuda.is_available():
        assert GPipe(three_layers(), [1, 1, 1]).devices == [torch.device("cpu")] * 3


def test_surplus_devices_are_dropped() -> None:
    assert len(GPipe(three_layers(), [1, 2], devices=["cpu"] * 5).devices) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"balance": None}, ValueError, r"balance is required.*gpipe_cli\.balance"),
        ({"chunks": 0}, ValueError, "number of chunks must be positive integer"),
        ({"chunks": -1}, ValueError, "number of chunks must be positive integer"),
        (
            {"checkpoint": "INVALID"},
            ValueError,
            "checkpoint is not one of 'always', 'except_last'",
        ),
        (
            {"schedule": "fastest"},
            ValueError,
            "unknown schedule 'fastest'; choose one of 1f1b, gpipe, interleaved",
        ),
        (
            {"balance": [2]},
            ValueError,
            r"\(module: 3, sum of balance: 2\).*gpipe_cli\.balance",
        ),
        (
            {"balance": [0, 3]},
            ValueError,
            r"must be positive integer \(balance: \[0, 3\]\)",
        ),
        ({"balance": [-1, 4]}, ValueError, "all balance numbers must be positive integer"),
        ({"devices": ["cpu"]}, IndexError, r"too few devices .* \(devices: 1, partitions: 2\)"),
    ],
)
def test_every_mistake_is_named(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GPipe(three_layers(), **{"balance": [1, 2], **arguments})


def test_a_module_that_is_no_sequence_is_refused_with_how_to_make_one() -> None:
    module: Any = nn.Linear(1, 1)
    with pytest.raises(
        TypeError, match=r"non-sequential module cannot be partitioned; give nn.Sequential\(\*layers"
    ):
        GPipe(module, [1])


def test_a_list_of_modules_functions_and_factories_is_a_pipe() -> None:
    """As DeepSpeed's PipelineModule takes it."""

    @dataclass
    class LayerSpec:  # DeepSpeed's, which has more fields
        kind: type[nn.Module]
        arguments: tuple[Any, ...]

        def build(self) -> nn.Module:
            return self.kind(*self.arguments)

    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 8),
        torch.relu,
        LayerSpec(nn.Linear, (8, 8)),
        lambda x: x * 2,
        partial(nn.Linear, 8, 8),
        nn.Tanh,
        lambda: nn.Linear(8, 2),
    ]
    sequence = listed_layers(layers)
    assert [name for name, _ in sequence.named_parameters()][::2] == [f"{at}.weight" for at in (0, 2, 4, 6)]
    balance = balance_by_params(sequence, 2)
    assert len(balance) == 2 and sum(balance) == len(layers)
    torch.manual_seed(0)
    input = torch.randn(6, 4)
    expected = sequence(input)
    with GPipe(sequence, balance, chunks=2) as pipe:
        torch.testing.assert_close(pipe(input), expected)
    with GPipe([nn.Linear(4, 2), torch.relu], [1, 1]) as pipe:
        assert pipe(input).shape == (6, 2)


def test_what_cannot_be_a_layer_of_a_list_is_refused() -> None:
    class TiedLayerSpec:
        """As in DeepSpeed, which ties by a name."""

    with pytest.raises(TypeError, match=r"TiedLayerSpec.* is tied; make the module once"):
        listed_layers([cast("Any", TiedLayerSpec())])
    with pytest.raises(TypeError, match=r"layer 1 is a int \(3\); give a module, a function or a factory"):
        GPipe([nn.ReLU(), cast("Any", 3)], [2])


def test_the_same_layer_twice_is_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        GPipe(nn.Sequential(layer, layer), [1, 1])


@pytest.mark.parametrize("arguments", [("cpu",), (torch.device("cpu"),), (0,), (torch.ones(1),)])
def test_moving_it_is_denied(arguments: tuple[object, ...]) -> None:
    pipe = GPipe(three_layers(), [1, 2])
    for move in (lambda: pipe.to(*arguments), pipe.cpu, pipe.cuda, lambda: pipe.to(device="cpu")):
        with pytest.raises(TypeError, match="denied to move parameters and buffers"):
            move()


def test_changing_its_dtype_is_not_denied() -> None:
    pipe = GPipe(three_layers(), [1, 2])
    assert pipe.half()[0].weight.dtype == torch.float16
    assert pipe.to(torch.float64)[0].weight.dtype == torch.float64


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_state_goes_both_ways_without_renaming(balance: list[int]) -> None:
    model, pipe = three_layers(), GPipe(three_layers(), balance)
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    pipe.load_state_dict(model.state_dict())
    assert all(torch.equal(*pair) for pair in zip(pipe.parameters(), model.parameters(), strict=True))
    model.load_state_dict(pipe.state_dict())


def test_the_state_of_torchgpipe_loads_too() -> None:
    model, pipe = three_layers(), GPipe(three_layers(), [1, 2])
    names = {"0": "partitions.0.0", "2": "partitions.1.2"}
    state = {names[key[0]] + key[1:]: value for key, value in model.state_dict().items()}
    pipe.load_state_dict(state)
    assert all(torch.equal(*pair) for pair in zip(pipe.parameters(), model.parameters(), strict=True))


def test_a_sequence_with_names_of_its_own_keeps_them(caplog: pytest.LogCaptureFixture) -> None:
    def named() -> LayerSequence:
        return LayerSequence(three_layers(), paths=["stem", "act", "block.0"])

    pipe = GPipe(named(), [1, 2])
    assert list(pipe.state_dict()) == ["stem.weight", "stem.bias", "block.0.weight", "block.0.bias"]
    assert [name for name, _ in pipe.named_parameters()] == list(pipe.state_dict())
    model = named()
    pipe.load_state_dict(model.state_dict())
    model.load_state_dict(pipe.state_dict())
    assert torch.equal(model(torch.ones(1, 2)), pipe(torch.ones(1, 2)))
    caplog.set_level(logging.DEBUG, logger="gpipe_cli")
    gpipe_cli.register_layer_logging_hooks(pipe.partitions)
    with pytest.raises(RuntimeError) as caught:
        pipe(torch.ones(1, 3))
    assert "Executing layer 'stem' in partition 0: Linear [micro-batch 0]" in caplog.messages
    assert "layer 'stem' (Linear)" in caught.value.__notes__[0]
    pipe.close()


def test_a_missing_key_is_reported_by_the_models_own_name() -> None:
    pipe = GPipe(three_layers(), [1, 2])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.weight"'):
        pipe.load_state_dict({})


def test_copies_and_pickles_work_and_have_workers_of_their_own() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 2)), [1, 2], chunks=2)
    input = torch.ones(4, 2)
    torch.manual_seed(0)
    expected = pipe(input)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):  # noqa: S301 - pickled one line above
        torch.manual_seed(0)
        assert torch.equal(twin(input), expected)
        assert twin[0] is twin.partitions[0][0]
        assert twin[0] is not pipe[0]
        twin.close()


def test_a_pipe_can_be_saved_whole() -> None:
    buffer = io.BytesIO()
    torch.save(GPipe(three_layers(), [1, 2]), buffer)
    assert buffer.tell() > 0


def test_without_layers_it_is_the_identity() -> None:
    pipe = GPipe(nn.Sequential(), balance=[])
    assert torch.equal(pipe(torch.ones(3, 2)), torch.ones(3, 2))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9])
def test_any_number_of_rows_is_welcome(rows: int) -> None:
    model = three_layers()
    with GPipe(model, [1, 2], chunks=4) as pipe:
        input = torch.randn(rows, 2)
        torch.testing.assert_close(pipe(input), model(input))


def test_more_than_one_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        GPipe(three_layers(), [1, 2])(torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_a_layer_may_not_hand_over_foreign_objects_or_no_tensor_at_all(balance: list[int]) -> None:
    class Given(nn.Module):
        def __init__(self, output: object) -> None:
            super().__init__()
            self.output = output

        def forward(self, input: Tensor) -> object:
            return self.output

    cases = {
        r"got set as output\[1\]": (torch.ones(1), {1}),
        r"got object as output\['a'\]\[0\]": {"a": [object()]},
        "got tuple as output": (1, None),
    }
    for problem, output in cases.items():
        with (
            GPipe(nn.Sequential(Given(output), nn.Identity()), balance) as pipe,
            pytest.raises(TypeError, match=f"expected Tensor, but {problem}"),
        ):
            pipe(torch.ones(1))


def test_one_scalar_per_micro_batch_cannot_be_joined_but_can_be_the_loss_of_a_step() -> None:
    class Mean(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.mean()

    with GPipe(nn.Sequential(nn.Linear(2, 2), Mean()), [1, 1], chunks=2) as pipe:
        with pytest.raises(RuntimeError, match="cannot concatenate the outputs of 2 micro-batches"):
            pipe(torch.ones(4, 2))
        loss = pipe.step(torch.ones(4, 2), torch.ones(4), lambda output, target: output)
    assert loss.dim() == 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_eval_and_no_grad_go_the_same_way_and_keep_nothing(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with GPipe(model, [1, 2, 1], chunks=2, checkpoint="always", schedule=schedule) as pipe:
        pipe.eval()
        assert not pipe.partitions[1].training
        before = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            output = pipe(torch.ones(5, 2))
        assert not output.requires_grad
        torch.testing.assert_close(output, model(torch.ones(5, 2)))
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_step_refuses_to_run_without_gradients() -> None:
    pipe = GPipe(three_layers(), [1, 2])
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot run under no_grad"):
        pipe.step(torch.ones(1, 2), torch.ones(1, 1), functional.mse_loss)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_layer_is_at_most_twelve_frames_away_from_step(checkpoint: str) -> None:
    """Counting the frames in which the caller waits and those of the worker; version one had 19."""
    package = str(Path(gpipe_cli.__file__).parent)
    caller = threading.get_ident()
    counts = []

    def frames_of_gpipe(frame: Any) -> int:
        return sum(each.f_code.co_filename.startswith(package) for each, _ in traceback.walk_stack(frame))

    class CountFrames(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            waiting = sys._current_frames()[caller]
            counts.append(frames_of_gpipe(sys._getframe()) + frames_of_gpipe(waiting))
            return input

    model = nn.Sequential(nn.Linear(2, 2), CountFrames())
    with GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint) as pipe:
        for _ in range(2):
            pipe.step(torch.ones(4, 2), torch.ones(4, 2), functional.mse_loss)
    assert max(counts) <= 12


def test_a_pipe_inside_distributed_data_parallel_is_refused() -> None:
    """With luck torch raised that a variable was marked ready twice; otherwise the gradients were wrong."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=2) as pipe:
            wrapped = nn.parallel.DistributedDataParallel(pipe)
            with pytest.raises(
                RuntimeError, match="DistributedDataParallel around a pipe gives wrong gradients"
            ):
                wrapped(torch.rand(4, 4))
            with torch.no_grad():
                wrapped(torch.rand(4, 4))
            pipe.chunks = 1
            wrapped(torch.rand(4, 4)).sum().backward()
            # Before the group: whoever drops the group last waits for its threads, and this object would do so with
            # the interpreter's lock, which these threads may need.
            del wrapped
    finally:
        torch.distributed.destroy_process_group()
