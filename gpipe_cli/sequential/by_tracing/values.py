"""What flows through a graph: the kind and size of each value, and between which nodes memory is written.

Found by one run on the meta device, which has shapes but no storage. A leaf that looks at values cannot run
there; then the graph is run for real, on a copy of the model. Knows nothing of cuts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential.meta_clone import meta_like
from gpipe_cli.torch_internals.storage import storage_of
from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = ["Fact", "Span", "Values", "follow"]

_SHAPE_KEEPING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GELU)


@final
@dataclass(frozen=True, slots=True)
class Fact:
    """About what one node gives."""

    kind: type
    bytes: int
    """Of a tensor; anything else has none."""
    is_size: bool
    """A whole number or several of them, as shapes are made of."""

    @property
    def is_tensor(self) -> bool:
        return issubclass(self.kind, Tensor)


@final
@dataclass(frozen=True, slots=True)
class Span:
    """Nodes that work on the same memory, of which the last or one between them writes it."""

    first: fx.Node
    last: fx.Node


@final
@dataclass(frozen=True, slots=True)
class Values:
    facts: dict[fx.Node, Fact]
    spans: list[Span]
    output: Any
    """What the graph returned."""


def follow(
    graph: fx.Graph, model: nn.Module, clone: nn.Module, sample: tuple[Tensor, ...], modes: Iterable[bool]
) -> Values:
    """Run the graph in each of the modes; what is written in one of them is written."""
    facts: dict[fx.Node, Fact] = {}
    spans: list[Span] = []
    output = None
    for training in modes:
        run = _run(graph, model, clone, sample, training)
        facts.update(run.facts)
        spans += run.memory.spans()
        output = run.result
    return Values(facts, spans, output)


def _run(
    graph: fx.Graph, model: nn.Module, clone: nn.Module, sample: tuple[Tensor, ...], training: bool
) -> _Run:
    run = _Run(clone.train(training), graph, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            run.run(*map(meta_like, sample))
    except Exception as error:  # any code of the model's may be unable to do without values
        if any(tensor.is_meta for tensor in (*sample, *model.parameters())):
            raise ConfigError(_refusal(run.place, sample, error)) from error
    else:
        return run
    real = copy.deepcopy(model).train(training)
    for name, constant in vars(clone).items():
        if not hasattr(real, name):  # a constant that tracing left there
            setattr(real, name, constant)
    run = _Run(real, graph, device=None)
    try:
        with torch.no_grad():
            run.run(*(tensor.clone() for tensor in sample))
    except Exception as error:  # see above
        raise ConfigError(_refusal(run.place, sample, error)) from error
    return run


@final
class _Run(fx.Interpreter):
    """Runs a graph and keeps every value, so that no storage is used twice."""

    def __init__(self, module: nn.Module, graph: fx.Graph, device: str | None) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self._device = device
        self.facts: dict[fx.Node, Fact] = {}
        self.memory = _Memory()
        self.result: Any = None
        self.place = type(module).__name__

    def run_node(self, n: fx.Node) -> Any:
        self.place = (
            f"'{n.target}'" if n.op == "call_module" else f"{type(self.module).__name__}, at {n.name},"
        )
        given = [tensor for node in n.all_input_nodes for tensor in tensors_in(self.env[node])]
        versions = [version_of(tensor) for tensor in given]
        value = super().run_node(n)
        written = [
            tensor for tensor, version in zip(given, versions, strict=True) if version_of(tensor) != version
        ]
        self.memory.note(n, given, written, list(tensors_in(value)))
        self.result = value  # in the end that of the last node
        self.facts[n] = Fact(type(value), value.nbytes if isinstance(value, Tensor) else 0, _is_size(value))
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # On meta torch takes these apart in Python: half of all the time for what is known beforehand.
        if self._device == "meta" and isinstance(self.fetch_attr(target), _SHAPE_KEEPING):
            return torch.empty_like(args[0])
        return super().call_module(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return (
            meta_like(value)
            if isinstance(value, Tensor) and self._device == "meta" and not value.is_meta
            else value
        )

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """fx keeps lists and dicts that cannot be written; code compiled from a graph makes true ones."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_thawed, args)), {name: _thawed(value) for name, value in kwargs.items()}


@final
class _Memory:
    """Who makes, uses and writes each storage."""

    def __init__(self) -> None:
        self._born: dict[int, fx.Node] = {}
        self._touched: dict[int, list[fx.Node]] = {}
        self._written: dict[int, fx.Node] = {}

    def note(self, node: fx.Node, given: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        for storage in map(storage_of, made):
            self._born.setdefault(storage, node)
        for storage in map(storage_of, given):
            self._touched.setdefault(storage, []).append(node)
        for storage in map(storage_of, written):
            self._written[storage] = node

    def spans(self) -> Iterator[Span]:
        for storage, writer in self._written.items():
            touched = self._touched[storage]
            if self._born[storage].op == "get_attr":
                # The model's own memory: whoever reads it must come before or after the write as it did.
                yield Span(touched[0], touched[-1])
            else:
                yield Span(self._born[storage], writer)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member)


def _is_size(value: object) -> bool:
    members = value if isinstance(value, tuple) else (value,)
    return all(isinstance(member, int) and not isinstance(member, bool) and member >= 0 for member in members)


def _thawed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _thawed(member) for key, member in value.items()}
    return [_thawed(member) for member in value] if isinstance(value, list) else value


def _refusal(place: str, sample: tuple[Tensor, ...], error: Exception) -> str:
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in sample)
    reason = str(error).partition("\n")[0] or type(error).__name__
    return f"{place} does not take an input of {shapes}: {reason}"
