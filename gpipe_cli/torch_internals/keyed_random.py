"""Makes random operators draw from keyed generators, in the threads that ask for it.

The key comes from the layer and the micro-batch (pipeline/layer.py), so a recompute draws the same dropout masks as the
forward before it, with nothing saved.

torch's dispatcher has a key above autograd and autocast that no tensor carries and that each thread includes for
itself: TESTING_ONLY_GenericMode. Every random operator gets a kernel for that key which passes the thread's generator
on; every other operator falls through the key at no cost. A TorchDispatchMode would not do: below it, autocast no
longer reaches composite kernels, and every operator would pay for it.

Fused attention takes no generator and draws from the default one of its device. That gets the state of the thread's
generator for the time of the call, so the fast kernels stay in use.

torch.utils.checkpoint inside a layer repeats a forward with `torch.get_rng_state` and `torch.set_rng_state`. In a
thread that draws keyed numbers, these have the state of its generator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch._ops import OpOverload

from gpipe_cli.errors import GpipeError
from gpipe_cli.torch_internals.autograd import number_of

_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._dispatch_key_parse(_KEY_NAME)
_BELOW_KEY = torch._C._dispatch_keyset_full().remove(_KEY)
_include = torch._C._dispatch_tls_set_dispatch_key_included

Kernel = Callable[..., Any]


@final
class UnkeyedRandomError(GpipeError):
    """A random draw that no key can reproduce."""


_THREAD_KEY = "gpipe_keyed_random"


def _of_thread() -> KeyedRandom | None:
    """The one that this thread has entered, or the thread whose backward it runs."""
    # Among torch's own thread-local objects, which autograd passes on to the thread of each device.
    return torch._C._get_obj_in_tls(_THREAD_KEY) if torch._C._is_key_in_tls(_THREAD_KEY) else None


_default_locks: dict[torch.device, threading.Lock] = {}
"""Held while the default generator of a device has the state of a key."""
_NO_SOURCE = object()
BACKWARD = object()


@final
class KeyedRandom:
    """While entered, random operators of this thread draw from generators seeded by `seed_of(source)`.

    `source` is the layer that draws now: the loop over the layers assigns it before each call. In a backward it is
    BACKWARD, which stands for the number of the autograd node that draws. The first draw of a source seeds its
    generator, so a source that draws nothing costs an assignment. Draws that it cannot key are reported to
    `unkeyed(source, what)`. One object serves one thread at a time.
    """

    __slots__ = (
        "_default_on",
        "_generators",
        "_outer",
        "_seed_of",
        "_seeded",
        "_seeded_for",
        "_unkeyed",
        "source",
    )

    def __init__(self, seed_of: Callable[[Any], int], unkeyed: Callable[[Any, str], None]) -> None:
        _register_kernels()
        self.source: Any = None
        self._seed_of = seed_of
        self._unkeyed = unkeyed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seeded: set[torch.device] = set()
        self._seeded_for: Any = _NO_SOURCE
        self._default_on: torch.device | None = None

    def __reduce__(self) -> tuple[type[KeyedRandom], tuple[Callable[..., Any], ...]]:
        # Generators are created when needed and seeded before use: there is nothing to copy.
        return KeyedRandom, (self._seed_of, self._unkeyed)

    def __enter__(self) -> KeyedRandom:
        # A pipe may be a layer of another pipe: the outer one's draws continue where they were.
        self._outer = _of_thread()
        torch._C._stash_obj_in_tls(_THREAD_KEY, self)
        self._seeded_for = _NO_SOURCE
        if self._outer is None:
            _include(_KEY, True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._outer is None:
            _include(_KEY, False)
            torch._C._remove_obj_from_tls(_THREAD_KEY)
        else:
            torch._C._stash_obj_in_tls(_THREAD_KEY, self._outer)

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that the running source draws from on `device`."""
        generator = self._generator(device)
        if device not in self._seeded:
            if self.source is BACKWARD:
                _refuse_in_checkpoint()
            self._seeded.add(device)
        return generator

    def state(self, device: torch.device) -> Tensor:
        """The state that the running source draws from on `device`."""
        return self._generator(device).get_state()

    def set_state(self, state: Tensor, device: torch.device) -> None:
        self._generator(device).set_state(state)
        self._seeded.add(device)

    def _generator(self, device: torch.device) -> torch.Generator:
        """With the seed of the running source until it has drawn or its state is set."""
        source = self._drawing_source()
        if self._seeded_for != source:
            self._seeded_for = source
            self._seeded.clear()
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        if device not in self._seeded:
            generator.manual_seed(self._seed_of(source))
        return generator

    @contextlib.contextmanager
    def as_default(self, device: torch.device) -> Iterator[None]:
        """Inside, the default generator of an accelerator draws what the running source's generator would."""
        generator = self.generator(device)
        module = torch.get_device_module(device)
        # The state of a generator is in host memory, and a kernel gets its part of it when it is queued: nothing here
        # waits for the device. Only workers on one device wait for each other.
        with _default_locks.setdefault(device, threading.Lock()):
            self._default_on = device
            outside = module.get_rng_state(device)
            try:
                module.set_rng_state(generator.get_state(), device)
                yield
            finally:
                generator.set_state(module.get_rng_state(device))
                module.set_rng_state(outside, device)
                self._default_on = None

    def is_default(self, device: torch.device) -> bool:
        """Whether the thread is inside `as_default`: a kernel may call other random operators."""
        return self._default_on == device

    def owns(self, generator: Any) -> bool:
        """Whether `generator` is keyed already: one random operator may be made of another."""
        return any(generator._cdata == own._cdata for own in self._generators.values())  # type: ignore[attr-defined]

    def report(self, what: str) -> None:
        """Report a draw of the running source that it cannot key."""
        self._unkeyed(self._drawing_source(), what)

    def _drawing_source(self) -> Any:
        if self.source is not BACKWARD:
            return self.source
        node = torch._C._current_autograd_node()
        return -1 if node is None else number_of(node)


def _refuse_in_checkpoint() -> None:
    """A recompute inside a layer that has not set the state of its forward: its mask would be another one, and nobody
    would notice.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    if frame is not None:
        raise UnkeyedRandomError(
            "a layer draws random numbers inside torch.utils.checkpoint with preserve_rng_state=False, so its backward "
            "would use others than its forward. Remove preserve_rng_state=False"
        )


_libraries: list[torch.library.Library] = []
_registering = threading.Lock()


def _register_kernels() -> None:
    """Once per process; torch unregisters the kernels of a library that is collected."""
    with _registering:
        if _libraries:
            return
        fallthrough = torch.library.Library("_", "IMPL", _KEY_NAME)  # type: ignore[no-untyped-call]
        fallthrough.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
        kernels = torch.library.Library("aten", "IMPL", _KEY_NAME)  # type: ignore[no-untyped-call]
        for op in _random_operators():
            kernel = functools.partial(_dispatch, op, _kernel(op))
            kernels.impl(op, kernel, with_keyset=True)  # type: ignore[no-untyped-call]
        _libraries.extend((fallthrough, kernels))
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            _key_states(kind)


def _key_states(kind: str) -> None:
    """Let the functions for the state of the default generators have that of the thread's own, where it has one."""
    module: Any = torch if kind == "cpu" else torch.get_device_module(kind)
    get, put = module.get_rng_state, module.set_rng_state

    def place(given: Any) -> torch.device:
        device = torch.device(given)
        needs_index = kind != "cpu" and device.index is None
        return torch.device(kind, module.current_device()) if needs_index else device

    def owner(device: torch.device) -> KeyedRandom | None:
        random = _of_thread()
        return None if random is None or random.is_default(device) or _traces() else random

    @functools.wraps(get)
    def get_rng_state(device: Any = kind) -> Tensor:
        random = owner(place(device))
        return (get() if kind == "cpu" else get(device)) if random is None else random.state(place(device))

    @functools.wraps(put)
    def set_rng_state(new_state: Tensor, device: Any = kind) -> None:
        random = owner(place(device))
        if random is not None:
            random.set_state(new_state, place(device))
        elif kind == "cpu":
            put(new_state)
        else:
            put(new_state, device)

    holders: list[Any] = [module, torch.random] if kind == "cpu" else [module]
    for holder in holders:
        holder.get_rng_state, holder.set_rng_state = get_rng_state, set_rng_state


def _random_operators() -> Iterator[OpOverload]:
    """The operators that draw random numbers themselves; a composite one falls through to its operators."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet_name, _, overload = rest.partition(".")
        if namespace != "aten" or not hasattr(torch.ops.aten, packet_name):
            continue
        packet = getattr(torch.ops.aten, packet_name)
        op: OpOverload | None = getattr(packet, overload or "default", None)
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags or op in _DRAW_NOTHING:
            continue
        if any("seed" in argument.name for argument in op._schema.arguments):
            continue  # such as the backward of fused attention, which gets the seed of its forward
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            yield op


def _dispatch(op: OpOverload, kernel: Kernel, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    random = _of_thread()
    if random is None or _traces():
        return op.redispatch(keyset & _BELOW_KEY, *args, **kwargs)
    return kernel(random, keyset & _BELOW_KEY, args, kwargs)


def _traces() -> bool:
    """Whether torch's compiler or fake tensors run the operator to see what it is, not to draw."""
    mode = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) for key in (mode.FAKE, mode.PROXY, mode.FUNCTIONAL))


def _kernel(op: OpOverload) -> Kernel:
    target = _with_generator(op)
    if target is not None:
        return functools.partial(_keyed, op, target)
    if "dropout_state" in [argument.name for argument in op._schema.arguments]:
        return functools.partial(_recurrent, op)
    return functools.partial(_keyed_by_default, op)


def _with_generator(op: OpOverload) -> OpOverload | None:
    """The overload of the same operator that takes a generator and otherwise the same arguments."""
    wanted = [argument.name for argument in op._schema.arguments if argument.name != "generator"]
    packet = op.overloadpacket
    overloads: list[OpOverload] = [op, *(getattr(packet, name) for name in packet.overloads())]
    for overload in overloads:
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    return None


def _keyed(
    op: OpOverload,
    target: OpOverload,
    random: KeyedRandom,
    below: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    named = _named_arguments(op, args, kwargs)
    if named.get("generator") is not None:
        if not random.owns(named["generator"]):
            random.report("a torch.Generator of its own")
        return op.redispatch(below, *args, **kwargs)
    device = _device_of(named)
    if random.is_default(device):
        return op.redispatch(below, *args, **kwargs)
    named["generator"] = random.generator(device)
    return target.redispatch(below, **named) if target is op else target(**named)


def _keyed_by_default(
    op: OpOverload, random: KeyedRandom, below: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    named = _named_arguments(op, args, kwargs)
    device = _device_of(named)
    if not _draws(op, named) or random.is_default(device):
        return op.redispatch(below, *args, **kwargs)
    if op is torch.ops.aten.native_dropout.default:
        return _native_dropout(random, named["input"], named["p"])
    if device.type != "cpu":
        with random.as_default(device):
            return op.redispatch(below, *args, **kwargs)
    # All workers share the CPU and its default generator, so they would wait for each other.
    random.report(f"the operator {op}, which takes no generator")
    return op.redispatch(below, *args, **kwargs)


def _native_dropout(random: KeyedRandom, input: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """The fused dropout as operators that take a generator."""
    mask = torch.empty_like(input, dtype=torch.bool)
    mask.bernoulli_(1 - probability, generator=random.generator(input.device))
    scale = 0.0 if probability == 1 else 1 / (1 - probability)
    return input * mask * scale, mask


def _recurrent(
    op: OpOverload, random: KeyedRandom, below: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """cuDNN draws from a state that torch keeps from call to call: give it one of the source's own."""
    named = _named_arguments(op, args, kwargs)
    if not _draws(op, named):
        return op.redispatch(below, *args, **kwargs)
    if op is not torch.ops.aten._cudnn_rnn.default:
        random.report(f"the operator {op}, which takes no generator")
        return op.redispatch(below, *args, **kwargs)
    # Drawn on the CPU: the host needs the number, and must not wait for the device.
    seed = torch.empty((), dtype=torch.int64).random_(generator=random.generator(torch.device("cpu")))
    named["dropout_state"] = torch.ops.aten._cudnn_init_dropout_state(
        named["dropout"], True, int(seed), dtype=torch.uint8, device=_device_of(named)
    )
    return op.redispatch(below, **named)


def _draws(op: OpOverload, named: dict[str, Any]) -> bool:
    """Attention and recurrent kernels count as random for their dropout; without it they draw nothing."""
    # What equals its default is left out of a dispatched call.
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    values = defaults | named
    probability = next(values[name] for name in PROBABILITIES if name in values)
    return probability != 0 and values.get("train") is not False


PROBABILITIES = ("dropout_p", "dropout", "p")
"""What operators without a generator call the probability of their dropout."""


def _named_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _device_of(named: dict[str, Any]) -> torch.device:
    for value in named.values():
        if isinstance(value, Tensor):
            return value.device
    device = named.get("device")
    return torch.get_default_device() if device is None else torch.device(device)


# Tagged as random, but they draw nothing: one asks which attention kernel fits, which is dispatched by itself.
_DRAW_NOTHING = frozenset(
    {torch.ops.aten._fused_sdp_choice.default, torch.ops.aten._nested_tensor_softmax_with_shape.default}
)


def generator_states() -> dict[str, Any]:
    """The states of the process-wide generators outside torch, which are not keyed, by the name of their module."""
    states: dict[str, Any] = {"random": random.getstate()}
    # NumPy imports it at first use, perhaps in another thread at this moment.
    get_state = getattr(sys.modules.get("numpy.random"), "get_state", None)
    if get_state is not None:
        kind, keys, position, *rest = get_state()
        states["numpy.random"] = (kind, keys.tobytes(), position, *rest)
    return states
