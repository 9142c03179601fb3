"""Run a model once and record what it does.

Substitutes without storage stand for the model's parameters, so that a run takes no memory for weights. The sample has
values: as long as a forward computes with nothing but the sample, sizes and small buffers (masks, positions), it
computes for real, and Python decides on values as it would in training. Where such a tensor meets one without storage,
the result has no storage either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from gpipe_cli.errors import ConfigError
from gpipe_cli.pytree import flatten
from gpipe_cli.sequential.deferred import meta_like
from gpipe_cli.sequential.tracing.graph import (
    INPUTS,
    ConstantTensor,
    Device,
    FieldName,
    NodeInfo,
    NotRecordable,
    ReadDtype,
    SourceLine,
    TraceGraph,
    WriteSpan,
    add_node,
    info_of,
    located_tensors,
    map_tree,
    tensors_in,
)
from gpipe_cli.sequential.tracing.leaves import Leaves
from gpipe_cli.sequential.tracing.sample import SampleArguments
from gpipe_cli.sequential.tracing.substitutes import (
    MetaResults,
    Substitutes,
    needs_values,
    with_values,
    without_values,
)
from gpipe_cli.torch_internals.fake_tensors import bincount
from gpipe_cli.torch_internals.keyed_random import generator_states
from gpipe_cli.torch_internals.modules import intercept_calls, without_function_modes
from gpipe_cli.torch_internals.tensors import storage_of, version_of

_META = torch.device("meta")
_OUTPUT_HINT = "a model must return tensors, in tuples, lists and dicts if there are several"

_NAMES = """
    alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout gumbel_softmax
    multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm rrelu
"""
_RANDOM = frozenset(_NAMES.split())

_METADATA = """
    __hash__ __len__ __repr__ data_ptr dim element_size get_device is_complex is_conj is_contiguous is_floating_point
    is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_tensor ndimension nelement numel size
    storage_offset stride
"""
_READS_NO_VALUES = frozenset(_METADATA.split())
"""Functions of tensors that return numbers and lists but depend on shapes and types only."""

_LEAVES_TORCH = frozenset({"numpy", "__array__", "__dlpack__"})
"""Functions of tensors whose results are computed with outside torch, where nothing is recorded."""


_SIZED_BY_VALUES = {
    getattr(namespace, name)
    for namespace in (torch, torch.Tensor)
    for name in ("argwhere", "masked_select", "nonzero", "unique", "unique_consecutive")
}
"""Functions whose results have as many rows as the values of their input say."""

_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: operator.getitem,
    torch.Tensor.__setitem__: operator.setitem,
}

_METHODS: dict[Callable[..., Any], str] = {
    member: name
    for kind in reversed(torch.Tensor.__mro__)
    for name, member in vars(kind).items()
    if callable(member)
}
"""Not by `__name__`: that of some functions of torch.Tensor is the name of what they wrap."""


def record(
    model: nn.Module, substitutes: Substitutes, leaves: Leaves, inputs: SampleArguments, results: MetaResults
) -> TraceGraph:
    recorder = _CallRecorder(model, substitutes, leaves, results)
    recorder.add_inputs(inputs.tensors)
    random_states = generator_states()
    try:
        with intercept_calls(recorder.call_module, recorder.apply_function), recorder, torch.enable_grad():
            output = model(*inputs.args, **inputs.kwargs)
        recorder.check_assignments()
        trace = recorder.trace(output)
    except (NotRecordable, ConfigError):
        raise
    except Exception as error:  # the model's own code may raise anything
        error.add_note(recorder.location)
        raise
    # NumPy may have been imported meanwhile.
    if any(random_states.get(owner, state) != state for owner, state in generator_states().items()):
        raise NotRecordable(
            "",
            None,
            "it draws from Python's random or NumPy's, which a trace would not repeat; draw with torch",
        )
    return trace


@final
class _CallRecorder(TorchFunctionMode):
    def __init__(
        self, model: nn.Module, substitutes: Substitutes, leaves: Leaves, results: MetaResults
    ) -> None:
        super().__init__()
        self._results = results
        self._model = model
        self._substitutes = substitutes
        self._leaves = leaves
        # The first name of a module or tensor that has several.
        self._paths = {module: path for path, module in model.named_modules()}
        self._attributes = {
            id(substitutes.of(tensor)): path
            for path, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        devices = (tensor.device for tensor in model.parameters() if not tensor.is_meta)
        self._device = next(devices, torch.device("cpu"))
        self._autocast = _autocast_state()
        self._modules = [""]
        self._leaf_depth = 0
        self._inside: set[int] = set()  # modules and tensors of the leaf that runs
        self._graph = fx.Graph()
        self._calls = 0
        self._tensors = 0
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # so that no tensor gets the id of a freed one
        self._mark = object()  # on the tensors of this run
        self._dtype_reads: dict[torch.dtype, fx.Node] = {}
        self._copies: dict[int, Tensor] = {}
        self._sized_by_values: set[int] = set()
        self._memory = _MemoryAccesses()

    @property
    def location(self) -> str:
        """The module that was running when an error stopped the run."""
        return self._modules[-1]

    def add_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._memory.record(INPUTS, (), (), (tensor,))
            node = add_node(self._graph, "placeholder", _identifier(name), (), {}, NodeInfo())
            self._note_tensor(node, tensor, frozenset({name}), requires_grad=False)

    def trace(self, output: Any) -> TraceGraph:
        where = SourceLine.defining(type(self._model).forward)
        try:
            tensors, template = flatten(output, "output")
        except TypeError as error:
            raise ConfigError(
                f"{where}: the model's output is not supported: {error}; {_OUTPUT_HINT}"
            ) from error
        if not tensors:
            kind = type(output).__name__
            raise ConfigError(f"{where}: the model returns a {kind} without tensors; {_OUTPUT_HINT}")
        self._graph.output(self._replace(tuple(tensors)))
        return TraceGraph(self._graph, template, list(self._memory.write_spans()))

    def check_assignments(self) -> None:
        """Refuse a forward that assigns to a buffer: layers repeat calls, and in-place writes, but no assignments."""
        for path, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            module, _, name = path.rpartition(".")
            if tensor not in self._substitutes and self._leaves.outermost(module) is None:
                reason = f"it assigns to its '{name}'; write in place, with self.{name}.copy_(...)"
                raise NotRecordable(module, None, reason)

    # What nn.Module.__call__ and torch.autograd.Function.apply do during the run.

    def call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.get(module)
        if self._leaf_depth:
            if path is not None and id(module) not in self._inside:
                raise self._reaches_outside(path)
            return call(module, *args, **kwargs)
        if path is None:
            return call(module, *args, **kwargs)
        # No finally blocks: after an error the last module says where it happened.
        self._modules.append(path)
        if not self._leaves.include(path):
            output = call(module, *args, **kwargs)
            self._modules.pop()
            return output
        args, kwargs = self._substitutes.within((args, kwargs))
        with without_function_modes():
            before = _Versions((args, kwargs))
        self._leaf_depth += 1
        self._inside = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
        output = self._call_leaf(call, module, args, kwargs)
        self._leaf_depth -= 1
        self._modules.pop()
        with without_function_modes():
            self._add_call(path, args, kwargs, output, before.tensors, before.written())
        return output

    def apply_function(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._leaf_depth:
            raise self._not_recordable(
                "it calls a torch.autograd.Function, whose backward no recording repeats; call it in a submodule"
            )
        args, kwargs = self._substitutes.within((args, kwargs))
        return apply(*args, **kwargs)

    def _call_leaf(
        self, call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a leaf without storage; if its forward needs values, with copies of the model's tensors."""
        try:
            if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
                raise TypeError("scripted code takes no substitutes")
            key = self._results.module_key(module)
            if key is None or not any(True for _ in module.parameters()):
                return call(module, *args, **kwargs)
            return self._results.call(partial(call, module), args, kwargs, key)
        except (RuntimeError, TypeError) as error:
            real_args, real_kwargs = map_tree(with_values, (args, kwargs))
            try:
                with self._substitutes.with_values(module):
                    output = call(module, *real_args, **real_kwargs)
            except Exception as errorwith_values:
                raise errorwith_values from error
            return map_tree(without_values, output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._leaf_depth:
            self._check_inside(tensors_in((args, kwargs)))
        args, named = self._substitutes.within((tuple(args), dict(kwargs or {})))
        attribute = _attribute_of(func)
        if attribute == "device" and args[0].is_meta:
            return self._device
        if self._leaf_depth:
            return self._execute(func, args, named)
        if attribute == "dtype":
            self._note_dtype(args[0])
        if attribute == "requires_grad":
            return self._requires_grad(args[0])
        func, named = _of_known_size(func, args, named)
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        before = _Versions((args, named))
        copies = _Versions([self._copies.get(id(tensor), tensor) for tensor in before.tensors])
        try:
            output = self._execute(func, args, named)
        except (RuntimeError, TypeError) as error:
            if not any(tensor.is_meta for tensor in before.tensors) or not needs_values(func, args, named):
                raise
            raise self._not_recordable(
                f"it needs the values of tensors that the model computes ({error})"
            ) from error
        written = before.written() or [before.tensors[index] for index in copies.changed()]
        has_tensors = bool(tensors_in(output))
        depends_on_values = attribute is None and _reads_values(func, output)
        if args and id(args[0]) in self._sized_by_values:
            depends_on_values |= attribute == "shape" or func.__name__ in ("size", "numel", "__len__")
        if func in _SIZED_BY_VALUES or (func is torch.Tensor.__getitem__ and _is_mask(args[1])):
            self._sized_by_values.update(map(id, tensors_in(output)))
        if attribute is not None:
            func, args = getattr, (args[0], attribute)
        if has_tensors or written:
            self._add_call(func, args, named, output, before.tensors, written)
        elif func.__name__ in _LEAVES_TORCH and self._dependencies(before.tensors):
            raise self._not_recordable("it computes with values of tensors outside torch")
        elif before.tensors and depends_on_values:
            self._add_call(func, args, named, output, before.tensors, [], decides=True)
        return output

    def _execute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)

        def without_values(argument: Any) -> Any:
            if isinstance(argument, Tensor) and not argument.is_meta:
                return self._copy_of(argument)
            return _META if isinstance(argument, torch.device) else argument

        if func is torch.Tensor.__getitem__ and args[0].is_meta and _is_mask(args[1]):
            # The size of the result depends on the values of the mask, which are known.
            return without_values(with_values(args[0])[args[1]])
        meta_args, meta_kwargs = map_tree(without_values, (tuple(args), kwargs))
        return self._results.call(func, meta_args, meta_kwargs)

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """The copy without storage of a tensor with values."""
        if id(tensor) not in self._copies:
            self._alive.append(tensor)
            self._copies[id(tensor)] = copied = meta_like(tensor)
            self._memory.copy(copied, tensor)
        return self._copies[id(tensor)]

    def _add_call(
        self,
        target: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        tensors: list[Tensor],
        written: list[Tensor],
        *,
        decides: bool = False,
    ) -> None:
        """target: the path of a module, or a torch function."""
        if _autocast_state() != self._autocast:
            raise self._not_recordable("it changes autocast")
        is_module = isinstance(target, str)
        is_random = not isinstance(target, str) and target.__name__ in _RANDOM
        grad = torch.is_grad_enabled()
        if not grad and (is_module or written):
            raise self._not_recordable("it calls modules, or writes in place, with gradients disabled")
        result = tuple(output) if isinstance(output, torch.Size) else output
        info = NodeInfo(
            call=self._calls,
            modules=tuple(self._modules),
            line=SourceLine.running(),
            grad=grad,
            writes=bool(written),
            is_impure=bool(written) or is_module or is_random,
            decides=decides,
            result=result if decides else None,
            kind=type(result) if decides else type(None),
        )
        depends_on = self._dependencies(tensors)
        if is_module or is_random:
            depends_on |= {"parameters" if is_module else "random"}
        args, kwargs = self._replace((args, kwargs))
        node = add_node(self._graph, *_operation(target), args, kwargs, info)
        located = [(access, self._substitutes.of(tensor)) for access, tensor in located_tensors(output)]
        self._memory.record(self._calls, tensors, written, [tensor for _, tensor in located])
        for access, tensor in located:
            self._note_tensor(self._member(node, access), tensor, depends_on)
        self._calls += 1

    def _member(self, node: fx.Node, access: tuple[Any, ...]) -> fx.Node:
        """The tensor at a place in what a call returned."""
        call = info_of(node)
        if not access and call.grad:
            return node
        info = replace(call, is_impure=False, decides=False, result=None, kind=type(None))
        for key in access:
            read, name = (getattr, str(key)) if isinstance(key, FieldName) else (operator.getitem, key)
            node = add_node(self._graph, "call_function", read, (node, name), {}, info)
        return node if call.grad else add_node(self._graph, "call_function", torch.detach, (node,), {}, info)

    def _note_tensor(
        self,
        node: fx.Node,
        tensor: Tensor,
        depends_on: frozenset[str],
        *,
        requires_grad: bool = True,
    ) -> None:
        self._alive.append(tensor)
        tensor.recorded_by = self._mark  # type: ignore[attr-defined]
        self._nodes[id(tensor)] = node
        node.meta["trace"] = replace(
            info_of(node),
            kind=Tensor,
            place=self._tensors,
            shape=tuple(tensor.shape),
            bytes=tensor.nbytes,
            # Whatever depends on parameters has no values here.
            requires_grad=requires_grad
            and tensor.is_meta
            and tensor.is_floating_point()
            and torch.is_grad_enabled(),
            depends_on=depends_on,
        )
        self._tensors += 1

    def _dependencies(self, tensors: list[Tensor]) -> frozenset[str]:
        nodes = filter(None, map(self._reference, tensors))
        return frozenset().union(*(info_of(node).depends_on for node in nodes))

    def _replace(self, tree: Any) -> Any:
        return map_aggregate(tree, self._replacement)

    def _replacement(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._reference(leaf) or self._constant(leaf)
        if isinstance(leaf, torch.dtype):
            source = self._dtype_reads.get(leaf)
            return ReadDtype(leaf, None if source is None else info_of(source).place)
        if isinstance(leaf, torch.Generator):
            raise self._not_recordable(
                "it draws from a generator of its own, which recomputation would not repeat; draw from torch's"
            )
        return Device() if isinstance(leaf, torch.device) else leaf

    def _constant(self, tensor: Tensor) -> ConstantTensor:
        if getattr(tensor, "recorded_by", self._mark) is not self._mark:
            raise self._not_recordable(
                "it uses a tensor that an earlier call made, which layers do not keep; make it in every call, or keep "
                "it in a buffer"
            )
        if tensor.requires_grad:
            raise self._not_recordable(
                "it uses a parameter, or a module with parameters, that is not registered in the model; create it in "
                "__init__ and keep it in an attribute, an nn.ModuleList or an nn.ParameterList"
            )
        # A frozen nn.Parameter would become a parameter of the layer that holds it.
        return ConstantTensor(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)

    def _reference(self, tensor: Tensor) -> fx.Node | None:
        """The node of a tensor that a call returned, or of a parameter or buffer."""
        key = id(self._substitutes.of(tensor))
        if key not in self._nodes and key in self._attributes:
            path = self._attributes[key]
            info = NodeInfo(place=path, depends_on=frozenset({"parameters"}))
            self._nodes[key] = add_node(self._graph, "get_attr", path, (), {}, info)
        return self._nodes.get(key)

    def _note_dtype(self, tensor: Tensor) -> None:
        source = self._reference(tensor)
        if source is not None:
            self._dtype_reads[tensor.dtype] = source

    def _requires_grad(self, tensor: Tensor) -> bool:
        """No substitute requires gradients. A parameter has its own answer."""
        source = self._reference(tensor)
        if source is not None and source.op == "get_attr":
            return bool(attrgetter(str(source.target))(self._model).requires_grad)
        if source is not None and "parameters" in info_of(source).depends_on:
            raise self._not_recordable("it asks whether a computed tensor requires gradients")
        return tensor.requires_grad

    def _check_inside(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor in self._substitutes and id(tensor) not in self._inside:
                path = self._attributes.get(id(self._substitutes.of(tensor)), "its tensors")
                raise self._reaches_outside(path)

    def _reaches_outside(self, path: str) -> NotRecordable:
        reason = f"'{self._modules[-1]}' stays whole and uses '{path}', which may be in another layer"
        return NotRecordable(self._modules[-2], SourceLine.running(), reason)

    def _not_recordable(self, reason: str) -> NotRecordable:
        return NotRecordable(self._modules[-1], SourceLine.running(), reason.partition("\n")[0])


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu"))


@final
class _MemoryAccesses:
    """Storages are told apart by address, so the caller keeps every tensor alive."""

    def __init__(self) -> None:
        self._copied: dict[int, int] = {}
        self._created: dict[int, int] = {}
        self._used: dict[int, list[int]] = {}
        self._written: dict[int, int] = {}

    def copy(self, copied: Tensor, original: Tensor) -> None:
        """Let `copied` count as the memory of `original`."""
        self._copied[storage_of(copied)] = self._storage(original)

    def record(
        self, call: int, inputs: Iterable[Tensor], written: Iterable[Tensor], outputs: Iterable[Tensor]
    ) -> None:
        for storage in map(self._storage, inputs):
            self._used.setdefault(storage, []).append(call)
        for storage in map(self._storage, written):
            self._written[storage] = call
        for storage in map(self._storage, outputs):
            if storage not in self._used:  # otherwise a view of an input, or the model's own memory
                self._created.setdefault(storage, call)

    def write_spans(self) -> Iterator[WriteSpan]:
        for storage, writer in self._written.items():
            users = self._used[storage]
            if storage in self._created:
                yield WriteSpan(self._created[storage], writer)
            else:
                # The model's own memory: each reader must stay before or after the write, as it was.
                yield WriteSpan(users[0], users[-1])

    def _storage(self, tensor: Tensor) -> int:
        storage = storage_of(tensor)
        return self._copied.get(storage, storage)


@final
class _Versions:
    """The tensors in some arguments, and which of them have been written in place since.

    autograd counts a tensor's in-place writes in its version, also on the meta device.
    """

    def __init__(self, arguments: Any) -> None:
        self.tensors = tensors_in(arguments)
        self._versions = [version_of(tensor) for tensor in self.tensors]

    def changed(self) -> list[int]:
        pairs = zip(self.tensors, self._versions, strict=True)
        return [index for index, (tensor, version) in enumerate(pairs) if version_of(tensor) != version]

    def written(self) -> list[Tensor]:
        return [self.tensors[index] for index in self.changed()]


def _attribute_of(func: Callable[..., Any]) -> str | None:
    """The name of the tensor attribute that a function reads, such as "shape"; None for other functions."""
    descriptor = getattr(func, "__self__", None)
    return descriptor.__name__ if func.__name__ == "__get__" and descriptor is not None else None


def _reads_values(func: Callable[..., Any], output: Any) -> bool:
    return isinstance(output, bool | int | float | complex | list) and func.__name__ not in _READS_NO_VALUES


def _of_known_size(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A count of values with `minlength` as a function that checks that they are below it; others as they are."""
    counts = func in (torch.bincount, torch.Tensor.bincount) and len(args) == 1
    return (bincount, kwargs) if counts and [*kwargs] == ["minlength"] else (func, kwargs)


def _is_mask(index: Any) -> bool:
    tensors = tensors_in(index)
    return any(tensor.dtype == torch.bool for tensor in tensors) and not any(
        tensor.is_meta for tensor in tensors
    )


def _operation(target: str | Callable[..., Any]) -> tuple[str, str | Callable[..., Any]]:
    """The kind of a call of fx, and its target."""
    if isinstance(target, str):
        return "call_module", target
    if target in _METHODS and target not in _OPERATORS:
        return "call_method", _METHODS[target]
    return "call_function", _OPERATORS.get(target, target)


def _identifier(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name).strip("_") or "input"
