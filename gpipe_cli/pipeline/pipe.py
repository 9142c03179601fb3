"""The nn.Module that every pipe is: it looks like the sequence it wraps, and a runner runs the layers.

state_dict, load_state_dict, parameters and buffers use the names of the original module, for every balance. Loading
also understands torchgpipe's `partitions.N.` prefix. A pipe calls its layers one by one, so a hook on the sequence
itself would never run; registering one raises.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, final, overload

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.action_loop import Recorder
from gpipe_cli.pipeline.batchnorm import convert_deferred_batch_norm
from gpipe_cli.pipeline.executor import Executor
from gpipe_cli.pipeline.layer import layers_of
from gpipe_cli.pipeline.loss import LossFunction, Reduction, StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, gather, tensors_of
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.partitioning import make_partitions, partition_modules
from gpipe_cli.pytree import flatten, unflatten
from gpipe_cli.schedule.action import Checkpoint, checkpointed_counts
from gpipe_cli.sequential.sequence import layer_paths, original_output
from gpipe_cli.skip.skippable import verify_skippables
from gpipe_cli.torch_internals.dispatch_modes import active_transform
from gpipe_cli.torch_internals.gradients import is_inside_ddp

Member = TypeVar("Member")
Output: TypeAlias = Value | dict[str, Tensor]
"""A dict where the original model returns one."""

_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCHGPIPE_PREFIX = re.compile(r"^partitions\.\d+\.")


class Runner(Protocol):
    """Runs the mini-batches of a pipe: `Executor` in this process, `RankRunner` together with other processes."""

    @property
    def partition_devices(self) -> dict[int, torch.device]:
        """The device of each partition that this process runs, by its index."""

    def forward(self, batch: MiniBatch, checkpointed_counts: Sequence[int]) -> Value:
        """The output of the last layer; () if that layer is in another process."""

    def step(self, batch: MiniBatch, loss: StepLoss, checkpointed_counts: Sequence[int]) -> None:
        """Run the mini-batch forward and backward with `loss`."""

    def loss(self, batch: MiniBatch, loss: StepLoss) -> None:
        """Run the mini-batch forward with `loss`."""

    def log_layers(self) -> None:
        """From now on, log each layer that this process runs, with its time."""

    def close(self) -> None:
        """End the threads of the runner, or drop what it keeps between steps."""


class Pipe(nn.Module):
    """Constructed by functions and subclasses that call `_divide` and `_run_by`."""

    _runner: Runner
    checkpoint: Checkpoint
    devices: list[torch.device]
    partitions: nn.ModuleList
    """All partitions of the model, also those that other processes run."""

    def __init__(self, module: nn.Sequential, chunks: int, deferred_batch_norm: bool) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(
                "non-sequential module cannot be partitioned; give nn.Sequential(*layers), or to_sequential(model, x)"
            )
        self.chunks = int(chunks)
        if self.chunks <= 0:
            raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
        self.least_rows = 1
        """Rows that every layer needs in training mode: 2 for a batch norm with one value per channel and row. A
        mini-batch that is too small for `chunks` such micro-batches is split into fewer."""
        if len(set(module.children())) < len(module):
            raise ValueError("module with duplicate children is not supported")
        # Before anything is changed: a module that is refused must be as it was.
        verify_skippables(module)
        if deferred_batch_norm:
            converted = convert_deferred_batch_norm(module)
            assert isinstance(converted, nn.Sequential), "the children are converted, not the sequence"
            module = converted
        refuse_hooks(module, "pipe.module")
        self.module = module
        self._layers = layers_of(module)
        self._layer_modules = [layer.module for layer in self._layers]
        self._prefix = ""
        self.register_load_state_dict_pre_hook(_rename_keys_of_parent)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_own_names)  # type: ignore[no-untyped-call]

    def _divide(self, balance: Sequence[int]) -> None:
        """Make `partitions`; from then on, replacing a layer in them raises, as does a hook on one of them."""
        modules = partition_modules(self.module, self._layers, balance)
        for index, module in enumerate(modules):
            refuse_hooks(module, f"pipe.partitions[{index}]")
        # Not a registered child: the layers already are children of `module`, under their own names.
        self.__dict__["partitions"] = modules

    def _partitions_on(self, devices: Sequence[torch.device]) -> list[Partition]:
        """The partitions with their skips, on `devices` in turn, for a runner."""
        return make_partitions(self.partitions, self._layers, devices)

    def _run_by(self, runner: Runner, devices: list[torch.device], checkpoint: Checkpoint) -> Self:
        self._runner, self.devices, self.checkpoint = runner, devices, checkpoint
        return self

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: Literal[False] = False,
        *,
        reduction: Reduction = "mean",
    ) -> Tensor: ...

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        *,
        return_output: Literal[True],
        reduction: Reduction = "mean",
    ) -> tuple[Tensor, Output]: ...

    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: bool = False,
        *,
        reduction: Reduction = "mean",
    ) -> Tensor | tuple[Tensor, Output]:
        """Run forward and backward of a mini-batch: fill `.grad` and return the detached loss.

        key: determines all random numbers of the step; drawn from torch's default generator if None.
        reduction: whether `loss_fn` gives the mean or the sum of a micro-batch; so is the loss of the mini-batch.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step computes gradients and cannot run under no_grad: call the pipe instead")
        self._check_layers()
        batch = self._mini_batch(input, key)
        loss = StepLoss(self.module, loss_fn, target, batch, reduction, keeps_outputs=return_output)
        self._step(batch, loss)
        return self._step_result(loss, return_output)

    def loss(self, input: Value, target: Value, loss_fn: LossFunction) -> Tensor:
        """The loss of a mini-batch without gradients; its output never exists as a whole."""
        self._check_layers()
        batch = self._mini_batch(input)
        loss = StepLoss(self.module, loss_fn, target, batch)
        with torch.no_grad():
            self._runner.loss(batch, loss)
        return loss.total()

    def forward(self, input: Value) -> Output:
        self._check_layers()
        if self.chunks > 1 and torch.is_grad_enabled() and is_inside_ddp():
            # Its reducer takes the gradients of the first micro-batch for those of the whole mini-batch.
            raise RuntimeError(
                "DistributedDataParallel around a pipe gives wrong gradients, since a pipe runs a backward for each "
                "micro-batch; remove it, and average the gradients after backward, or train with "
                "gpipe train engine=processes data_parallel=2"
            )
        # Without layers there is nothing to split the input for.
        return self._original_output(self._forward(self._mini_batch(input))) if self._layers else input

    def _mini_batch(self, input: Value, key: int | None = None) -> MiniBatch:
        transform = active_transform(lambda: (*tensors_of(input), *self.parameters()))
        if transform is not None:
            raise RuntimeError(
                f"{transform} does not go through a pipe, whose layers run in other threads. Apply it to the layers, "
                "or to the module without a pipe"
            )
        return MiniBatch.of(input, self.chunks, key, self.least_rows if self.training else 1)

    def _forward(self, batch: MiniBatch) -> Value:
        return self._runner.forward(batch, self._checkpointed_counts(batch))

    def _step(self, batch: MiniBatch, loss: StepLoss) -> None:
        self._runner.step(batch, loss, self._checkpointed_counts(batch))

    def _checkpointed_counts(self, batch: MiniBatch) -> tuple[int, ...]:
        """By partition, the first micro-batch that is not checkpointed; in evaluation none is."""
        mode = self.checkpoint if self.training and batch.state.grad else "never"
        # A pipe without layers has no partition, but its executor runs one.
        return checkpointed_counts(mode, len(self.partitions) or 1, len(batch.micro_batches))

    @property
    def partition_devices(self) -> dict[int, torch.device]:
        """The device of each partition that this process runs, by its index."""
        return self._runner.partition_devices

    @property
    def input_device(self) -> torch.device:
        """The device of the first partition. Inputs must be there."""
        return self._executor.partitions[0].device

    @property
    def output_device(self) -> torch.device:
        """The device of the last partition. The targets of a step must be there."""
        return self._executor.partitions[-1].device

    @property
    def step_timeout(self) -> float | None:
        """Seconds after which a call raises StepTimeout if its workers have not ended; None waits without limit."""
        return self._executor.timeout

    @step_timeout.setter
    def step_timeout(self, seconds: float | None) -> None:
        self._executor.timeout = seconds

    @property
    def recorder(self) -> Recorder | None:
        """Called after every action; None costs nothing."""
        return self._executor.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._executor.recorder = recorder

    @property
    def _executor(self) -> Executor:
        assert isinstance(self._runner, Executor), (
            "in a process of several, torch's schedules run the partitions"
        )
        return self._runner

    def __len__(self) -> int:
        return len(self.module)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    def _check_layers(self) -> None:
        """Raise if the layers are no longer those that the constructor looked at."""
        containers: tuple[Iterable[nn.Module], ...] = (self.module, chain(*self.partitions))
        if any(
            child is not layer
            for container in containers
            for child, layer in zip_longest(container, self._layer_modules)
        ):
            raise RuntimeError(
                "a layer of the pipe was replaced, added or removed after the pipe was constructed. Construct a new "
                "pipe from the changed module"
            )

    def _original_output(self, value: Value) -> Output:
        """The output as the original model returns it; () where the last layer is in another process."""
        if isinstance(value, tuple) and not value:
            return ()
        output: Output = original_output(self.module, value)
        return output

    def _step_result(self, loss: StepLoss, return_output: bool) -> Tensor | tuple[Tensor, Output]:
        if not return_output:
            return loss.total()
        if not loss.outputs:
            return loss.total(), ()
        tensors, template = gather([flatten(output, "output") for output in loss.outputs])
        return loss.total(), self._original_output(unflatten(template, tensors))

    def log_layers(self) -> None:
        """From now on, log each layer that this process runs, with its time."""
        self._runner.log_layers()

    def close(self) -> None:
        """End the threads that run for this pipe. You may close it twice; using it again starts new ones."""
        self._runner.close()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.partitions.train(mode)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The signature is nn.Module's, whose overloads are too many to repeat for a delegation.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        given = {self._own_name(key): value for key, value in state_dict.items()}
        return self.module.load_state_dict(given, strict=strict, assign=assign)

    def _own_name(self, key: str) -> str:
        # A model may really have a child called 'partitions'; then its own names are the right ones.
        if any(name == "partitions" for name, _ in self.module.named_children()):
            return key
        return _TORCHGPIPE_PREFIX.sub("", key)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """By the paths of the original model, so that a module which holds a pipe gives its own names."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for path, layer in zip(layer_paths(self.module), self.module, strict=True):
            below = ".".join(filter(None, (prefix, path)))
            yield from layer.named_modules(memo, below, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Also a layer, by its name in the sequence: torch looks for submodules by their attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = getattr(self.__dict__.get("_modules", {}).get("module"), "_modules", {})
            if name not in layers:
                raise
            return layers[name]

    def get_submodule(self, target: str) -> nn.Module:
        """By the path in the original model. If its parts are in several layers, there is no such module any more."""
        return _only(self.named_modules(remove_duplicate=False), target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        return _only(self.named_parameters(remove_duplicate=False), target)

    def get_buffer(self, target: str) -> Tensor:
        return _only(self.named_buffers(remove_duplicate=False), target)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def _only(named: Iterable[tuple[str, Member]], name: str) -> Member:
    found = {id(member): member for own, member in named if own == name}
    if len(found) != 1:
        raise AttributeError(
            f"the model has {'nothing' if not found else 'parts in several layers'} at '{name}'"
        )
    return next(iter(found.values()))


def _rename_keys_of_parent(pipe: Pipe, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
    """A module that holds a pipe does not call `load_state_dict` of the pipe but loads into its children."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        own = pipe._own_name(key.removeprefix(prefix))
        state_dict[f"{prefix}module.{own}"] = state_dict.pop(key)
    pipe._prefix = prefix


def _report_own_names(pipe: Pipe, incompatible_keys: Any) -> None:
    """A parent reports missing and unexpected keys by the names it knows."""
    for keys in incompatible_keys:
        keys[:] = [
            pipe._prefix + key.removeprefix(f"{pipe._prefix}module.")
            if key.startswith(f"{pipe._prefix}module.")
            else key
            for key in keys
        ]


@final
class _NoHooks(OrderedDict[int, Any]):
    """Takes the place of the dictionary in which torch keeps hooks."""

    what = "the module"

    def __setitem__(self, key: int, hook: Any) -> None:
        raise RuntimeError(
            f"a hook on {self.what} would never run: a pipe calls its layers one by one. Register it on a layer, "
            "pipe[i], or on the pipe itself"
        )


def refuse_hooks(module: nn.Module, what: str) -> None:
    """Raise if `module` has hooks, and make registering one raise."""
    for kind in _HOOK_DICTS:
        if getattr(module, kind):
            raise ValueError(
                f"{what} has a hook, which would never run: a pipe calls its layers one by one. Register it on a "
                "layer instead"
            )
        none = _NoHooks()
        none.what = what
        setattr(module, kind, none)
