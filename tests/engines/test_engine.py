from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe, current_microbatch
from gpipe_cli.engines import single, threads
from gpipe_cli.engines.engine import RECORDED_STEP, StepMeter
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.errors import NumericError, ResourceError
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.profiling.records import Sample

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def objective(precision: str = "fp32", loss: Callable[..., Tensor] | None = None) -> TrainingObjective:
    return TrainingObjective(
        loss or nn.CrossEntropyLoss(),
        accuracy,
        optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9),
        precision=precision,
    )


def on_one_thread(module: nn.Sequential, task: TrainingObjective) -> Engine:
    return single.build(EngineSpec(module, task, [len(module)], [CPU], chunks=3, eval_chunks=2))


def on_two_workers(module: nn.Sequential, task: TrainingObjective, offload: str | None = None) -> Engine:
    sample = partial(Sample, *batch())
    balance = [len(module) - 1, 1]
    spec = EngineSpec(module, task, balance, [CPU, CPU], chunks=3, eval_chunks=2, make_sample=sample)
    return threads.build(spec, offload)


def offloaded(module: nn.Sequential, task: TrainingObjective) -> Engine:
    return on_two_workers(module, task, "cpu")


@pytest.fixture(params=[on_one_thread, on_two_workers, offloaded])
def build(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(module: nn.Sequential, task: TrainingObjective) -> Engine:
        made.append(request.param(module, task))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Those that are in memory: an offloaded partition has none between steps."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_an_evaluation_changes_nothing(build: Callable[..., Engine]) -> None:
    module = model()
    engine = build(module, objective())
    engine.train_step(batch(), key=1, lr=0.1)
    state = copy.deepcopy(engine.state().model)
    gradients = copy.deepcopy(gradients_of(module))
    generator = torch.get_rng_state()
    facts = engine.eval_step(batch())
    assert facts.samples == 8 and facts.grad_norm is None
    assert all(torch.equal(state[name], now) for name, now in module.state_dict().items())
    assert all(map(torch.equal, gradients, gradients_of(module)))
    assert torch.equal(torch.get_rng_state(), generator) and torch.is_grad_enabled()
    assert all(submodule.training for submodule in module.modules())


def test_training_goes_on_after_an_evaluation_as_if_there_had_been_none(build: Callable[..., Engine]) -> None:
    straight, interrupted = model(), model()
    uninterrupted, other = build(straight, objective()), build(interrupted, objective())
    for step in range(3):
        other.eval_step(batch())
        results = [each.train_step(batch(), key=step, lr=0.1) for each in (uninterrupted, other)]
        first, second = (replace(result, transfers=None) for result in results)
        assert first == second
    expected, tensors = uninterrupted.state().model, other.state().model
    assert all(torch.equal(expected[name], value) for name, value in tensors.items())
    assert all(map(torch.equal, gradients_of(straight), gradients_of(interrupted)))


def test_an_evaluation_is_that_of_the_plain_model(build: Callable[..., Engine]) -> None:
    module = model()
    engine = build(module, objective())
    input, target = batch()
    result = engine.eval_step((input, target))
    module.eval()
    with torch.no_grad():
        output = module(input)
    assert result.loss == pytest.approx(float(nn.functional.cross_entropy(output, target)), rel=1e-6)
    assert result.sums == accuracy(output, target)


def test_a_step_kept_all_outputs_although_its_measures_need_one_micro_batch_at_a_time(
    build: Callable[..., Engine],
) -> None:
    rows: list[int] = []
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def measure(output: Tensor, target: Tensor) -> dict[str, float]:
        rows.append(len(target))
        outputs.append(weakref.ref(output))
        return accuracy(output, target)

    class Last(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            alive.append(sum(output() is not None for output in outputs))
            return super().forward(input)

    module = nn.Sequential(nn.Linear(6, 8), Last(8, 3))
    plain = copy.deepcopy(module)
    engine = build(module, replace(objective(), measure=measure))
    input, target = batch()
    facts = engine.train_step((input, target), key=0, lr=0.1)
    assert rows == [3, 3, 2] and facts.sums == accuracy(plain(input), target)
    assert max(alive) <= 1, "backward of the micro-batch before may still be running"


def test_a_step_that_nobody_looks_at_measures_nothing(build: Callable[..., Engine]) -> None:
    engine = build(model(), objective())
    facts = engine.train_step(batch(), key=0, lr=0.1, measure=False)
    assert facts.sums == {} and facts.samples == 8
    assert engine.train_step(batch(), key=0, lr=0.1).sums.keys() == {"top1"}


def test_a_micro_batch_that_is_recomputed_counts_once() -> None:
    calls: list[int] = []

    def measure(output: Tensor, target: Tensor) -> dict[str, float]:
        calls.append(len(target))
        return {"top1": float(len(target))}

    task = replace(objective(), measure=measure)
    spec = EngineSpec(model(), task, [4, 1], [CPU, CPU], chunks=3, eval_chunks=2, checkpoint="always")
    engine = threads.build(spec)
    assert engine.train_step(batch(), key=0, lr=0.1).sums == {"top1": 8.0} and calls == [3, 3, 2]
    engine.close()


def test_inputs_may_be_several_tensors(build: Callable[..., Engine]) -> None:
    class Together(nn.Module):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
            return inputs[0] + inputs[1]

    module = nn.Sequential(Together(), nn.Linear(6, 3))
    engine = build(module, objective())
    input, target = batch()
    facts = engine.train_step(((input, input), target), key=0, lr=0.1)
    assert facts.samples == 8 and engine.eval_step(((input, input), target)).samples == 8


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_runs_the_layers_and_spares_the_loss(
    build: Callable[..., Engine], precision: str
) -> None:
    dtypes: list[Any] = []

    class Watched(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            output: Tensor = super().forward(input)
            dtypes.append(output.dtype)
            return output

    losses: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        losses.append(output.dtype)
        return nn.functional.cross_entropy(output, target)

    engine = build(nn.Sequential(Watched(6, 8), Watched(8, 3)), objective(precision, loss))
    assert engine.train_step(batch(), key=0, lr=0.1).loss < 10
    assert engine.eval_step(batch()).loss < 10
    assert set(dtypes) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert set(losses) == {torch.float32}
    assert all(
        parameter.grad is None or parameter.grad.dtype == torch.float32
        for parameter in engine.module.parameters()
    )


def test_closing_twice_is_fine(build: Callable[..., Engine]) -> None:
    engine = build(model(), objective())
    engine.train_step(batch(), key=0, lr=0.1)
    engine.close()
    engine.close()


class BadFrom(nn.Module):
    """Gives a number that is not finite for the rows of one micro-batch, or a gradient that is not."""

    def __init__(self, micro_batch: int, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.micro_batch, self.where = micro_batch, where

    def forward(self, input: Tensor) -> Tensor:
        here = current_microbatch()
        if here is None or here.index != self.micro_batch:
            return input * self.weight
        if self.where == "output":
            return input * self.weight / 0.0
        # The root's slope at 0 is infinite; its value is 0.
        return input * self.weight + (self.weight - self.weight.detach()).sqrt()


def test_the_first_layer_whose_output_is_not_finite_is_named(build: Callable[..., Engine]) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), BadFrom(1, "output"), nn.Linear(8, 3))
    before = copy.deepcopy(module.state_dict())
    engine = build(module, objective())
    with pytest.raises(NumericError, match="the loss is nan") as caught:
        engine.train_step(batch(), key=1, lr=0.1)
    assert caught.value.__notes__ == [
        "first output that is not finite: layer '2' (BadFrom) in partition 0, micro-batch 1"
    ]
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())


def test_the_first_gradient_that_is_not_finite_is_named(build: Callable[..., Engine]) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), BadFrom(0, "gradient"), nn.Linear(8, 3))
    engine = build(module, objective())
    with pytest.raises(NumericError, match="the gradient norm is inf") as caught:
        engine.train_step(batch(), key=1, lr=0.1)
    assert caught.value.__notes__ == ["all layers' outputs are finite; first gradient that is not: 2.weight"]


class Greedy(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        here = current_microbatch()
        assert here is not None
        return input if here.index != 1 else torch.empty(1 << 50, dtype=torch.uint8) + input


def test_memory_that_runs_out_is_a_resource_error_with_its_place(build: Callable[..., Engine]) -> None:
    engine = build(nn.Sequential(nn.Linear(6, 8), Greedy(), nn.Linear(8, 3)), objective())
    wanted = r"out of memory: cannot allocate 1,125,899,906,842,624 bytes; try more chunks, "
    with pytest.raises(ResourceError, match=wanted) as caught:
        engine.train_step(batch(), key=1, lr=0.1)
    (note,) = caught.value.__notes__
    assert "layer '1' (Greedy), micro-batch 1" in note


@pytest.mark.parametrize(("schedule", "devices"), [("gpipe", 2), ("interleaved", 1)])
def test_a_step_tells_how_busy_each_partition_was(schedule: str, devices: int) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    data = torch.randn(8, 8)
    with GPipe(module, [1, 2], devices=["cpu"] * devices, chunks=4, schedule=schedule) as pipe:
        meter = StepMeter(pipe, watched=True)
        for _ in range(2):
            with meter.next_step(measured=True):
                pipe.step(data, data, nn.functional.mse_loss)
        utilization = meter.utilization
        assert utilization is not None and pipe.recorder is None
        assert len(utilization.busy) == 2 and all(0 < share <= 1 for share in utilization.busy)
        assert utilization.bubble == pytest.approx(1 - sum(utilization.busy) / devices)
        assert utilization.memory == (None, None)


def test_a_step_that_fails_leaves_nothing_recording() -> None:
    with GPipe(nn.Sequential(nn.Linear(8, 8)), [1], devices=["cpu"]) as pipe:
        meter = StepMeter(pipe, watched=True)
        with (
            pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
            meter.next_step(measured=True),
        ):
            pipe.step(torch.randn(2, 3), torch.randn(2, 8), nn.functional.mse_loss)
        assert pipe.recorder is None and meter.utilization is None


@pytest.mark.parametrize("build", [on_two_workers, offloaded])
def test_an_engine_records_one_early_step_whether_or_not_it_is_measured(
    build: Callable[..., Engine],
) -> None:
    engine = build(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), objective())
    facts = [engine.train_step(batch(), key=step, lr=0.1, measure=False) for step in range(5)]
    engine.close()
    assert [step for step, fact in enumerate(facts, 1) if fact.timeline is not None] == [RECORDED_STEP]
    timeline = facts[RECORDED_STEP - 1].timeline
    assert timeline is not None and 0 <= timeline.bubble < 1
    assert {(span.action.partition, span.phase) for span in timeline.spans} >= {
        (partition, phase) for partition in (0, 1) for phase in ("forward", "backward")
    }
    assert all(fact.utilization is None for fact in facts), "nobody watches"


@pytest.mark.accelerator
def test_only_a_measured_step_waits_for_the_end_of_the_update(simulated: Any) -> None:
    devices = simulated.devices[:2]
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    engine = threads.build(EngineSpec(module, objective(), [2, 1], devices, chunks=3, eval_chunks=2))
    engine.train_step(batch(), key=0, lr=0.1)
    simulated.reset()
    engine.train_step(batch(), key=1, lr=0.1, measure=False)
    # The loss, and the norms of the gradients of all devices: both are checked before anything changes.
    assert len(simulated.host_syncs()) == 2
    simulated.reset()
    engine.train_step(batch(), key=2, lr=0.1)
    last = simulated.host_syncs()[-len(devices) :]
    assert all("streams.py" in sync and "synchronize" in sync for sync in last)
    engine.close()


@pytest.mark.accelerator
def test_another_thread_may_read_the_state_of_an_update_on_a_stream_of_the_caller(simulated: Any) -> None:
    device = simulated.devices[0]
    with torch.Stream(device):
        engine = single.build(EngineSpec(model(), objective(), [5], [device], chunks=3, eval_chunks=2))
        engine.train_step(batch(), key=0, lr=0.1, measure=False)
        state = engine.state()
    with ThreadPoolExecutor(1) as writer:
        writer.submit(lambda: [tensor.cpu() for tensor in (state.model | state.optimizer).values()]).result()
    engine.close()
    assert simulated.races() == []
