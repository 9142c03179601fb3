"""Offloading to and from an accelerator: the bits of one device, no race, and no more memory than allowed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.offload import OffloadModel, tiers
from gpipe_cli.profiling.records import Sample
from gpipe_cli.torch_internals.tensors import exchanges_memory
from tests.accelerator import simulator

pytestmark = pytest.mark.accelerator

ADAMW = partial(torch.optim.AdamW, lr=0.0)
MOMENTUM = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
WIDTH = 128
CHUNKS = 3


Devices = list[torch.device]


def model(blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [
        layer
        for _ in range(blocks)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.3))
    ]
    return nn.Sequential(nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(24, 64, generator=generator), torch.randint(10, (24,), generator=generator)


def make_spec(folder: Path, devices: Devices, blocks: int = 3, **changes: Any) -> EngineSpec:
    task = {"loss": nn.CrossEntropyLoss(), "measure": accuracy, "optimizer": ADAMW, **changes.pop("task", {})}
    input, target = (tensor.tensor_split(CHUNKS)[0] for tensor in batch(0))
    spec = EngineSpec(
        module := model(blocks),
        TrainingObjective(**task),
        [len(module)],
        devices,
        chunks=CHUNKS,
        eval_chunks=2,
        checkpoint="always",
        deferred_batch_norm=True,
        scratch=folder,
        make_sample=lambda: Sample(input, target, task["loss"]),
    )
    return replace(spec, **changes)


def reference(spec: EngineSpec) -> Engine:
    """On one device; a simulated device has the bits of the CPU."""
    device = torch.device("cpu") if simulator.loaded() is not None else spec.devices[0]
    module = model(len(spec.module) // 4)
    whole = {"module": module, "balance": [len(module)], "devices": [device]}
    return single.build(replace(spec, **whole, schedule="gpipe"))


def assert_same_training(engine: Engine, expected: Engine, *, evaluates: bool = True) -> None:
    for step in range(3):
        mine, theirs = (each.train_step(batch(step), key=step, lr=0.1) for each in (engine, expected))
        assert (mine.loss, mine.grad_norm, mine.sums) == (theirs.loss, theirs.grad_norm, theirs.sums)
    if evaluates:
        assert engine.eval_step(batch(99)) == expected.eval_step(batch(99))
    mine_state, their_state = in_memory(engine.state()), in_memory(expected.state())
    for part in ("model", "buffers", "optimizer"):
        tensors, wanted = getattr(mine_state, part), getattr(their_state, part)
        assert tensors.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(tensors[name], wanted[name]), f"{part}: {name}"


def in_memory(state: EngineState) -> EngineState:
    fetch = state.fetch or (lambda tensor: tensor)
    parts = (state.model, state.buffers, state.optimizer)
    return EngineState(*({name: fetch(tensor).cpu() for name, tensor in part.items()} for part in parts))


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"slices": 5}},
        {"engine": {"slices": 3, "prefetch": False}, "task": {"clip_grad_norm": 0.1}},
        {"engine": {"slices": 4}, "checkpoint": "never", "task": {"optimizer": MOMENTUM}},
    ],
    ids=["prefetching", "clipping", "not recomputing"],
)
def test_training_is_that_of_one_device_to_the_bit(
    to: str, changes: dict[str, Any], accelerators: Devices, tmp_path: Path
) -> None:
    others = {key: value for key, value in changes.items() if key != "engine"}
    spec = make_spec(tmp_path, accelerators[:1], **others)
    with (
        closing(offload.build(spec, to=to, **changes["engine"])) as engine,
        closing(reference(spec)) as expected,
    ):
        assert_same_training(engine, expected)


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize(("schedule", "balance"), [("1f1b", [5, 9]), ("interleaved", [3, 3, 3, 5])])
def test_partitions_on_several_devices_can_be_offloaded(
    to: str, schedule: str, balance: list[int], accelerators: Devices, tmp_path: Path
) -> None:
    if len(accelerators) < 2:
        pytest.skip("needs two accelerators")
    spec = make_spec(tmp_path, accelerators[:2], balance=balance, schedule=schedule)
    with closing(threads.build(spec, offload=to)) as engine, closing(reference(spec)) as expected:
        assert_same_training(engine, expected)


@pytest.mark.parametrize("first", ["cpu", "accelerator"])
def test_partitions_on_a_cpu_and_an_accelerator_can_be_offloaded_where_torch_can_move_parameters(
    first: str, accelerators: Devices, tmp_path: Path
) -> None:
    devices = [torch.device("cpu"), accelerators[0]][:: 1 if first == "cpu" else -1]
    spec = make_spec(tmp_path, devices, balance=[5, 9], schedule="1f1b")
    if not exchanges_memory(accelerators[0]):
        with pytest.raises(ConfigError, match=r"engine.offload=cpu: .*; give devices of one type"):
            threads.build(spec, offload="cpu")
        return
    if simulator.loaded() is None:
        pytest.skip("a CPU rounds differently from a real accelerator")
    with closing(threads.build(spec, offload="cpu")) as engine, closing(reference(spec)) as expected:
        assert_same_training(engine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("seed", range(4))
def test_training_is_the_same_when_kernels_run_late(
    to: str, seed: int, simulated: simulator.Simulator, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, simulated.devices[:1])
    with simulated.asynchronous(seed), closing(offload.build(spec, to=to, slices=5)) as engine:
        # Late kernels have other shapes in the evaluation of batch norm than the CPU's.
        assert_same_training(engine, reference(spec), evaluates=False)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_host_waits_once_per_slice_and_for_the_loss(
    clip: float | None, simulated: simulator.Simulator, tmp_path: Path
) -> None:
    """It used to wait for every parameter and every copy: 81 times in a step of a small model.

    Before the host launches the update of a slice it must know that the gradients are finite. Copies are ordered by
    events alone.
    """
    with closing(
        offload.build(make_spec(tmp_path, simulated.devices[:1], task={"clip_grad_norm": clip}), slices=5)
    ) as engine:
        for step in range(4):
            before = len(simulated.host_syncs())
            engine.train_step(batch(step), key=step, lr=0.1, measure=False)
        waits = simulated.host_syncs()[before:]
    assert len(waits) == 5 + 1, "\n".join(waits)


def test_a_file_costs_a_wait_for_each_piece_that_the_host_reads_or_overwrites(
    simulated: simulator.Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    for name in ("load", "store"):
        move = getattr(tiers.Staging, name)

        def counted(self: Any, memory: Tensor, work: Any, name: str = name, move: Any = move) -> None:
            pieces.append(name)
            move(self, memory, work)

        monkeypatch.setattr(tiers.Staging, name, counted)
    with closing(offload.build(make_spec(tmp_path, simulated.devices[:1]), to="disk", slices=5)) as engine:
        for step in range(4):
            before = len(simulated.host_syncs())
            pieces.clear()
            engine.train_step(batch(step), key=step, lr=0.1, measure=False)
            engine.state()  # waits for the stores, and for its device
        waits = [wait for wait in simulated.host_syncs()[before:] if " state\n" not in wait]
    assert 5 + 1 + pieces.count("store") <= len(waits) <= 5 + 1 + len(pieces), "\n".join(waits)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_pinned_memory_is_allocated_once_and_in_sizes_that_torch_does_not_round_up(
    to: str, accelerators: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a file used to pin a buffer of its own, and each region was rounded up to a power of two."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = empty(*args, **kwargs)
        sizes.extend([tensor.nbytes] if kwargs.get("pin_memory") else [])
        return tensor

    monkeypatch.setattr(tiers.torch, "empty", counted)
    with closing(offload.build(make_spec(tmp_path, accelerators[:1]), to=to, slices=5)) as engine:
        for step in range(2):
            engine.train_step(batch(step), key=step, lr=0.1)
        after_first_steps = len(sizes)
        engine.train_step(batch(2), key=2, lr=0.1)
    assert len(sizes) == after_first_steps
    assert all(size & (size - 1) == 0 for size in sizes)
    if to == "disk":
        assert sizes == [tiers.STAGING_BYTES] * 2
    else:
        state = sum(3 * parameter.nbytes for parameter in model().parameters())
        assert sum(sizes) < 1.5 * state


@pytest.mark.parametrize(
    ("to", "task"),
    [
        pytest.param("cpu", {"optimizer": ADAMW}, id="adamw"),
        pytest.param("disk", {"optimizer": ADAMW, "clip_grad_norm": 0.1}, id="clipping"),
        pytest.param(
            "cpu", {"optimizer": partial(torch.optim.SGD, lr=0.0)}, id="sgd", marks=pytest.mark.slow
        ),
        pytest.param("disk", {"optimizer": MOMENTUM}, id="momentum", marks=pytest.mark.slow),
        pytest.param(
            "disk", {"optimizer": partial(ADAMW, foreach=False)}, id="for-loop", marks=pytest.mark.slow
        ),
        pytest.param("cpu", {"optimizer": partial(ADAMW, fused=True)}, id="fused", marks=pytest.mark.slow),
    ],
)
def test_a_model_larger_than_its_device_trains_within_the_memory_that_it_may_use(
    to: str, task: dict[str, Any], simulated: simulator.Simulator, tmp_path: Path
) -> None:
    """Asked for 50 MiB, the engine used to take 85 in the first step, which creates the optimizer's state."""
    spec = make_spec(tmp_path, simulated.devices[:1], blocks=8, task=task)
    limit = offload.Slicing(spec, to, memory="1GiB").demand().of([1] * len(spec.module))
    device = spec.devices[0]
    held = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    with (
        simulated.memory_limit(held + limit),
        closing(offload.build(spec, to=to, memory=limit)) as engine,
        closing(reference(spec)) as expected,
    ):
        assert_same_training(engine, expected)
        state = in_memory(expected.state())
    assert torch.accelerator.max_memory_allocated(device) - held <= limit
    whole = sum(tensor.nbytes for tensor in (*state.model.values(), *state.optimizer.values()))
    assert limit < whole


def test_a_python_training_loop_sees_gradients_and_updates_parameters_in_host_memory(
    accelerators: Devices,
) -> None:
    device = accelerators[0]
    if not exchanges_memory(device):
        with pytest.raises(TypeError, match="must be of a kind whose memory torch can give to a parameter"):
            OffloadModel(nn.Sequential(nn.Linear(2, 2)), device)
        return
    layers = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    plain = layers[1] if simulator.loaded() is not None else layers[1].to(device)
    expected_device = next(plain.parameters()).device
    with OffloadModel(layers[0], device, num_slices=3) as model:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for step in range(3):
            input = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(input.to(device)).square().sum().backward()
            plain(input.to(expected_device)).square().sum().backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None and mine.device.type == "cpu"
                assert torch.equal(mine.grad, theirs.grad.cpu())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_what_stays_on_the_device_can_be_read_on_the_cpu_and_goes_back_for_the_next_step(
    accelerators: Devices,
) -> None:
    device = accelerators[0]
    if not exchanges_memory(device):
        pytest.skip("OffloadModel refuses this kind of device")
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    layers[2].weight = layers[0].weight
    with OffloadModel(layers, torch.device(device.type), num_slices=2) as model:
        assert (
            model.device.index is not None
        )  # "cuda" alone is the current device; torch's streams need an index
        for _ in range(2):
            model(torch.randn(8, 4, device=device)).square().sum().backward()
            state = (*model.cpu().parameters(), *model.buffers())
            assert {tensor.device.type for tensor in state} == {"cpu"}
            assert all(parameter.grad is not None for parameter in model.parameters())
