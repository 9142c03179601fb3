"""The kind and size of each value in a graph, and where in the graph memory is written in place.

Like torch.fx's ShapeProp it interprets the graph, on the meta device, which has shapes but no storage. A leaf whose
forward looks at values cannot run there; the graph then runs for real, on a copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.without_storage import meta_like
from gpipe_cli.torch_internals.tensor_memory import storage_of, version_of

# On the meta device torch decomposes these into many Python calls, which would take half of all the time.
_SHAPE_PRESERVING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GELU)


@final
@dataclass(frozen=True, slots=True)
class ValueInfo:
    """What is known about the value of a node."""

    kind: type
    bytes: int
    """0 unless it is a tensor."""
    is_size: bool
    """Whether it is a whole number or a tuple of whole numbers, as shapes are."""

    @property
    def is_tensor(self) -> bool:
        return issubclass(self.kind, Tensor)


@final
@dataclass(frozen=True, slots=True)
class WriteSpan:
    """The first and last of the nodes that use the same memory, which one of them writes in place.

    A cut between the two would separate the memory from its writer, since layers exchange detached tensors.
    """

    first: fx.Node
    last: fx.Node


@final
@dataclass(frozen=True, slots=True)
class GraphInfo:
    values: dict[fx.Node, ValueInfo]
    spans: list[WriteSpan]
    output: Any
    """The value that the graph returned."""


def propagate_shapes(
    graph: fx.Graph, model: nn.Module, clone: nn.Module, sample: tuple[Tensor, ...], modes: Iterable[bool]
) -> GraphInfo:
    """Run the graph in each of the modes; a write in any of them counts."""
    values: dict[fx.Node, ValueInfo] = {}
    spans: list[WriteSpan] = []
    output = None
    for training in modes:
        run = _interpret(graph, model, clone, sample, training)
        values.update(run.values)
        spans += run.memory.write_spans()
        output = run.result
    return GraphInfo(values, spans, output)


def _interpret(
    graph: fx.Graph, model: nn.Module, clone: nn.Module, sample: tuple[Tensor, ...], training: bool
) -> _RecordingInterpreter:
    run = _RecordingInterpreter(clone.train(training), graph, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            run.run(*map(meta_like, sample))
    except Exception as error:  # the model's own code may need values and raise anything without them
        if any(tensor.is_meta for tensor in (*sample, *model.parameters())):
            raise ConfigError(_input_error(run.location, sample, error)) from error
    else:
        return run
    # A copy: running for real may change buffers, such as the statistics of batch norm.
    real = copy.deepcopy(model).train(training)
    for name, constant in vars(clone).items():
        if not hasattr(real, name):  # a constant that tracing stored on the clone
            setattr(real, name, constant)
    run = _RecordingInterpreter(real, graph, device=None)
    try:
        with torch.no_grad():
            run.run(*(tensor.clone() for tensor in sample))
    except Exception as error:  # again the model's own code
        raise ConfigError(_input_error(run.location, sample, error)) from error
    return run


def _input_error(location: str, sample: tuple[Tensor, ...], error: Exception) -> str:
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in sample)
    reason = str(error).partition("\n")[0] or type(error).__name__
    return f"{location} does not accept an input of shape {shapes}: {reason}"


@final
class _RecordingInterpreter(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph, device: str | None) -> None:
        # Keep every value alive: storages are told apart by address, and a freed one would be reused.
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self._device = device
        self.values: dict[fx.Node, ValueInfo] = {}
        self.memory = _MemoryAccesses()
        self.result: Any = None
        self.location = type(module).__name__
        """Where the interpreter is, for an error message."""

    def run_node(self, n: fx.Node) -> Any:
        self.location = (
            f"'{n.target}'" if n.op == "call_module" else f"{type(self.module).__name__}, at {n.name},"
        )
        inputs = [tensor for node in n.all_input_nodes for tensor in _tensors_in(self.env[node])]
        versions = [version_of(tensor) for tensor in inputs]
        value = super().run_node(n)
        # autograd counts a tensor's in-place writes in its version, also under no_grad and on the meta device.
        written = [
            tensor for tensor, version in zip(inputs, versions, strict=True) if version_of(tensor) != version
        ]
        self.memory.record(n, inputs, written, list(_tensors_in(value)))
        self.result = value  # after the last node, the output
        nbytes = value.nbytes if isinstance(value, Tensor) else 0
        self.values[n] = ValueInfo(type(value), nbytes, _is_size(value))
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._device == "meta" and isinstance(self.fetch_attr(target), _SHAPE_PRESERVING):
            return torch.empty_like(args[0])
        return super().call_module(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        is_real_tensor = isinstance(value, Tensor) and not value.is_meta
        return meta_like(value) if is_real_tensor and self._device == "meta" else value

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass mutable lists and dicts, as compiled graphs do; fx stores immutable ones in its nodes."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_mutable, args)), {name: _mutable(value) for name, value in kwargs.items()}


@final
class _MemoryAccesses:
    """Which nodes create, use and write each storage."""

    def __init__(self) -> None:
        self._created: dict[int, fx.Node] = {}
        self._used: dict[int, list[fx.Node]] = {}
        self._written: dict[int, fx.Node] = {}

    def record(
        self, node: fx.Node, inputs: list[Tensor], written: list[Tensor], outputs: list[Tensor]
    ) -> None:
        for storage in map(storage_of, outputs):
            self._created.setdefault(storage, node)
        for storage in map(storage_of, inputs):
            self._used.setdefault(storage, []).append(node)
        for storage in map(storage_of, written):
            self._written[storage] = node

    def write_spans(self) -> Iterator[WriteSpan]:
        for storage, writer in self._written.items():
            users = self._used[storage]
            if self._created[storage].op == "get_attr":
                # The model's own memory: each reader must stay before or after the write, as it was.
                yield WriteSpan(users[0], users[-1])
            else:
                yield WriteSpan(self._created[storage], writer)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(member)


def _is_size(value: object) -> bool:
    members = value if isinstance(value, tuple) else (value,)
    return all(isinstance(member, int) and not isinstance(member, bool) and member >= 0 for member in members)


def _mutable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mutable(member) for key, member in value.items()}
    return [_mutable(member) for member in value] if isinstance(value, list) else value
