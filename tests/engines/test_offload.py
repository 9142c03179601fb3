"""engine=offload against engine=single: the same numbers to the last bit, whatever is moved where and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.engines import offload, single, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective
from gpipe_cli.engines.state import EngineState
from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.models import gpt, resnet, unet
from gpipe_cli.offload import tiers
from gpipe_cli.profiling.records import Sample
from gpipe_cli.runs.snapshots.contents import copy_state

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.0)
Batches = Callable[[int], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Equal bits are promised for equal threads; one of them leaves the other cores to other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    )


def rows(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def objective(**changes: Any) -> TrainingObjective:
    return TrainingObjective(
        **{"loss": nn.CrossEntropyLoss(), "measure": accuracy, "optimizer": SGD, **changes}
    )


def plain(module: nn.Sequential, task: TrainingObjective, *, deferred: bool = True) -> Engine:
    spec = EngineSpec(
        module, task, [len(module)], [CPU], chunks=3, eval_chunks=2, deferred_batch_norm=deferred
    )
    return single.build(spec)


def sample_of(batches: Batches, loss: Any) -> Callable[[], Sample]:
    """One of three micro-batches."""
    input, target = (tensor.tensor_split(3)[0] for tensor in batches(0))
    return lambda: Sample(input, target, loss)


def offloaded(
    module: nn.Sequential,
    task: TrainingObjective,
    folder: Path,
    *,
    deferred: bool = True,
    batches: Batches = rows,
    checkpoint: str = "always",
    **changes: Any,
) -> Engine:
    spec = EngineSpec(
        module,
        task,
        [len(module)],
        [CPU],
        chunks=3,
        eval_chunks=2,
        checkpoint=checkpoint,
        deferred_batch_norm=deferred,
        scratch=folder,
        make_sample=sample_of(batches, task.loss),
    )
    return offload.build(spec, **{"slices": 3, "to": "disk", **changes})


def in_memory(state: EngineState) -> EngineState:
    fetch = state.fetch or (lambda tensor: tensor)
    return EngineState(
        {name: fetch(source).clone() for name, source in state.model.items()},
        {name: fetch(source).clone() for name, source in state.buffers.items()},
        {name: fetch(source).clone() for name, source in state.optimizer.items()},
        state.numbers,
    )


def assert_equal(engine: Engine, reference: Engine) -> None:
    mine, theirs = in_memory(engine.state()), in_memory(reference.state())
    for part in ("model", "buffers", "optimizer"):
        tensors, expected = getattr(mine, part), getattr(theirs, part)
        assert tensors.keys() == expected.keys()
        for name in expected:
            assert torch.equal(tensors[name], expected[name]), f"{part}: {name}"
    assert mine.numbers == theirs.numbers


def assert_same_steps(engine: Engine, reference: Engine, batches: Batches, steps: Iterable[int]) -> None:
    for step in steps:
        assert_same_step(engine, reference, batches, step)
    assert engine.eval_step(batches(99)) == reference.eval_step(batches(99))
    assert_equal(engine, reference)


def assert_same_step(engine: Engine, reference: Engine, batches: Batches, step: int) -> None:
    mine, theirs = (
        each.train_step(batches(step), key=step, lr=0.1 / (step + 1)) for each in (engine, reference)
    )
    assert (mine.loss, mine.grad_norm, mine.skipped) == (theirs.loss, theirs.grad_norm, theirs.skipped)
    assert mine.sums == theirs.sums


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize(
    "changes",
    [
        {"slices": 1},
        {"slices": 2, "prefetch": False},
        {"slices": 5, "checkpoint": "except_last"},
        {"slices": 7, "checkpoint": "never"},
        {"slices": 5, "task": {"clip_grad_norm": 0.1}},
        {"slices": 5, "checkpoint": "never", "task": {"optimizer": ADAMW, "clip_grad_norm": 0.1}},
        {"slices": 4, "task": {"optimizer": ADAMW, "precision": "bf16"}},
        {"slices": 4, "task": {"precision": "fp16"}},
        {"slices": 4, "task": {"optimizer": partial(torch.optim.SGD, lr=0.0)}},
    ],
    ids=str,
)
def test_training_is_that_of_one_thread_to_the_bit(to: str, changes: dict[str, Any], tmp_path: Path) -> None:
    task = objective(**changes.get("task", {}))
    others = {key: value for key, value in changes.items() if key != "task"}
    with closing(offloaded(small(), task, tmp_path, to=to, **others)) as engine:
        assert_same_steps(engine, plain(small(), task), rows, range(5))


def images(classes: int) -> Batches:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return (
            torch.randn(6, 3, 32, 32, generator=generator),
            torch.randint(classes, (6,), generator=generator),
        )

    return batch


def pictures(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    input = torch.randn(3, 3, 32, 32, generator=generator)
    return input, torch.randn(3, 4, 32, 32, generator=generator)


def tokens(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def per_token(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def no_measure(output: Any, target: Tensor) -> dict[str, float]:
    return {}


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Batches, Any]] = {
    "resnet18": (partial(resnet.build, "resnet18"), images(10), nn.CrossEntropyLoss()),
    "gpt": (
        partial(
            gpt.build, num_classes=11, input_shape=(8,), depth=3, width=16, heads=2, dropout=0.2, tied=True
        ),
        tokens,
        per_token,
    ),
    "unet": (partial(unet.build, base_channels=8), pictures, nn.MSELoss()),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_of_a_real_model_are_equal(
    name: str, slices: int, to: str, checkpoint: str, optimizer: Any, tmp_path: Path
) -> None:
    compare_model(name, 20, tmp_path, slices=slices, to=to, checkpoint=checkpoint, optimizer=optimizer)


@pytest.mark.parametrize(
    ("name", "to"),
    [pytest.param("resnet18", "cpu", marks=pytest.mark.slow), ("gpt", "disk"), ("unet", "disk")],
)
def test_some_steps_of_a_real_model_are_equal(name: str, to: str, tmp_path: Path) -> None:
    compare_model(name, 2, tmp_path, slices=5, to=to, checkpoint="always", optimizer=ADAMW)


def compare_model(
    name: str, steps: int, folder: Path, *, slices: int, to: str, checkpoint: str, optimizer: Any
) -> None:
    build, batches, loss = MODELS[name]
    modules, tasks, gradients = [], [], []
    for _ in range(2):
        torch.manual_seed(1)
        modules.append(build())
        gradients.append(Gradients(modules[-1]))
        noted = gradients[-1].noted_by(optimizer)
        tasks.append(objective(loss=loss, measure=no_measure, optimizer=noted))
    offloading = offloaded(
        modules[0], tasks[0], folder, batches=batches, slices=slices, to=to, checkpoint=checkpoint
    )
    with closing(offloading) as engine:
        reference = plain(modules[1], tasks[1])
        for step in range(steps):
            assert_same_step(engine, reference, batches, step)
            mine, theirs = gradients[0].taken(), gradients[1].taken()
            assert mine.keys() == theirs.keys() == dict(modules[1].named_parameters()).keys()
            for parameter, gradient in theirs.items():
                assert torch.equal(mine[parameter], gradient), parameter
        assert_same_steps(engine, reference, batches, [steps])


class Gradients:
    """Those that optimizers of a model's parameters have made a step with, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._found: dict[str, Tensor] = {}

    def noted_by(self, make: Any) -> Any:
        def make_and_listen(parameters: Any) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = make(parameters)
            optimizer.register_step_pre_hook(self._note)
            return optimizer

        return make_and_listen

    def taken(self) -> dict[str, Tensor]:
        gradients, self._found = self._found, {}
        return gradients

    def _note(self, optimizer: torch.optim.Optimizer, *rest: object) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter in self._names:  # else one of no importance that the optimizer is tried on
                self._found[self._names[parameter]] = parameter.grad.clone()


@pytest.mark.parametrize(
    ("schedule", "partitions", "workers"),
    [("gpipe", 3, 3), ("1f1b", 2, 2), ("interleaved", 4, 2), ("interleaved", 6, 2), ("zero_bubble", 2, 2)],
)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_partitions_of_a_pipeline_can_be_offloaded(
    to: str, clip: float | None, schedule: str, partitions: int, workers: int, tmp_path: Path
) -> None:
    task = objective(optimizer=ADAMW, clip_grad_norm=clip)
    spec = EngineSpec(
        small(),
        task,
        [7 - partitions + 1] + [1] * (partitions - 1),
        [CPU] * workers,
        chunks=3,
        eval_chunks=2,
        schedule=schedule,
        deferred_batch_norm=True,
        step_timeout=60,
        scratch=tmp_path,
        make_sample=sample_of(rows, task.loss),
    )
    engine = threads.build(spec, offload=to)
    with closing(engine):
        assert_same_steps(engine, plain(small(), task), rows, range(3))


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("start", ["single", "offload"])
def test_a_state_goes_from_engine_to_engine(start: str, to: str, tmp_path: Path) -> None:
    task = objective(optimizer=ADAMW)
    with (
        closing(offloaded(small(), task, tmp_path, to=to)) as first,
        closing(offloaded(small(), task, tmp_path, to=to, slices=2)) as second,
    ):
        reference = plain(small(), task)
        engines = [reference, second] if start == "single" else [first, plain(small(), task)]
        for step in range(2):
            engines[0].train_step(rows(step), key=step, lr=0.1)
        engines[1].load_state(copy_state(in_memory(engines[0].state())))
        assert_same_steps(engines[0], engines[1], rows, range(2))


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_parameters_that_layers_share_stay_and_are_trained(slices: int, tmp_path: Path) -> None:
    """They once went with their slice where it had all of their layers, which then computed with numbers of none."""

    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)

    task = objective(optimizer=ADAMW, clip_grad_norm=0.5)
    with closing(offloaded(tied(), task, tmp_path, slices=slices)) as engine:
        assert_same_steps(engine, plain(tied(), task), rows, range(3))
        assert {"0.weight", "2.weight"} == set(in_memory(engine.state()).model)


def test_after_an_error_in_a_layer_the_engine_goes_on(tmp_path: Path) -> None:
    with closing(offloaded(small(), objective(), tmp_path)) as engine:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            engine.train_step((torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)), key=1, lr=0.1)
        assert "layer '0' (Linear)" in str(caught.value.__notes__)
        assert_same_steps(engine, plain(small(), objective()), rows, range(2))


def test_what_is_moved_and_waited_for_is_told(tmp_path: Path) -> None:
    with closing(offloaded(small(), objective(), tmp_path)) as engine:
        transfers = [engine.train_step(rows(step), key=1, lr=0.1).transfers for step in range(2)]
    first, second = transfers
    assert first is not None and second is not None
    weights = sum(parameter.nbytes for parameter in small().parameters())
    assert min(first.moved_bytes, second.moved_bytes) > 3 * weights
    assert min(first.waited_seconds, second.waited_seconds) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slices": 8}, "engine.slices=8: the model has only 7 layers; give at most that many"),
        ({"slices": 0}, "engine.slices=0: must be at least 1"),
        ({"to": "tape"}, "engine.to=tape: must be one of: cpu, disk"),
        ({"by": "luck"}, "engine.by=luck: must be one of: bytes, time"),
        (
            {"memory": "1GiB"},
            "engine.memory=1GiB: decides how many slices there are; remove engine.slices",
        ),
        ({"memory": "much", "slices": None}, "engine.memory=much: expected a number of bytes"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        offloaded(small(), objective(), tmp_path, **changes)


def test_the_model_of_a_file_takes_no_memory_between_steps(tmp_path: Path) -> None:
    module = small()
    with closing(offloaded(module, objective(), tmp_path)) as engine:
        engine.train_step(rows(1), key=1, lr=0.1)
        for parameter in module.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
            assert parameter.isnan().all()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clip", [None, 0.1])
def test_all_that_a_step_keeps_on_the_disk_is_reserved_before_the_first(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What slices are recomputed from included, of a smaller mini-batch too."""
    task = objective(optimizer=ADAMW, clip_grad_norm=clip)
    with closing(offloaded(small(), task, tmp_path)) as engine:
        monkeypatch.setattr(tiers.os, "posix_fallocate", lambda *_: pytest.fail("in the middle of a step"))
        for count in (8, 6, 7):
            input, target = rows(count)
            engine.train_step((input[:count], target[:count]), key=count, lr=0.1)


class Hungry(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if any(parameter.shape == (3, 5) for parameter in self.param_groups[0]["params"]):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB.")


def test_memory_that_runs_out_in_an_update_is_not_blamed_on_a_layer(tmp_path: Path) -> None:
    """It used to be reported as the backward of the slice's first layer, with the cures of a pipeline."""
    task = objective(optimizer=partial(Hungry, lr=0.1))
    with closing(offloaded(small(), task, tmp_path)) as engine, pytest.raises(ResourceError) as caught:
        engine.train_step(rows(0), key=0, lr=0.1)
    assert str(caught.value).startswith("out of memory: cannot allocate 2.00 GiB; try more engine.slices or")
    assert caught.value.__notes__ == ["in partition 2, while updating its parameters"]
