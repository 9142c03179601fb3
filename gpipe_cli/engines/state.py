"""Everything a training step changes in an engine, by the original model's names: take it out, and load it again.

Names instead of positions make a state independent of partitions. The learning rate is not part of it, because it is
a function of the step. Everything in a state fits into safetensors and JSON.

A snapshot's digests prove that it is intact, not that it fits: names, shapes, dtypes and numbers are compared with
those of the engine before any of them is loaded. torch itself would convert, broadcast, or fail at the first step.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import is_out_of_memory
from gpipe_cli.engines.half_precision import GRADIENT_SCALE, RANDOM_KEY, in_chunks, optimizer_class
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.profiling.memory import MakeOptimizer, OptimizerStateShapes

STORABLE_TYPES = (bool, int, float, str, type(None))
EXCLUDED_SETTINGS = ("params", "param_names", "lr", RANDOM_KEY, GRADIENT_SCALE)
"""Settings of a parameter group that the model, the learning-rate schedule and the step decide."""
WITHOUT_STATE = "without_state"
"""Among an optimizer's numbers: the parameters without any state, because they never had a gradient."""
OTHER_WEIGHTS = "other_weights"
"""The entry of an optimizer's state with `ema`: the average of the parameter or, in evaluation and snapshots, the
parameter in training, whose place the average then has."""
UPDATES = "averaged_updates"
"""A setting of each parameter group, with `ema`: how many updates the average is made of."""
LOADED_BYTES = 64 * 2**20
"""How much of a state that is read on demand is in memory besides the engine's own tensors; at least one tensor."""
_MAX_NAMES = 5
"""In a message: the state of another model differs in hundreds of names."""
_KINDS = ("truth value", "number", "text", "nothing")
"""The kinds of optimizer state that are not tensors."""
_COUNT = "/step"
"""torch's optimizers count the updates of a parameter under this key, and take roots and powers of the count."""
Groups = list[dict[str, Any]]


@final
@dataclass(frozen=True)
class EngineState:
    """The part of one process. The tensors are those the engine trains: copy them before the next step."""

    model: dict[str, Tensor]
    """The state_dict: parameters and buffers."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that a state_dict leaves out."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """By `parameter/key`, such as `conv1.weight/exp_avg`."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The rest, as JSON: the optimizer state that is not tensors, and the loss scale."""
    resets_optimizer: bool = False
    """Whether an engine that loads this state starts with a fresh optimizer."""
    fetch: Callable[[Tensor], Tensor] | None = None
    """Reads the value of a tensor that has no storage itself, for a state that may be larger than memory."""

    @property
    def nbytes(self) -> int:
        tensors = (*self.model.values(), *self.buffers.values(), *self.optimizer.values())
        return sum(tensor.nbytes for tensor in tensors)

    def value(self, tensor: Tensor) -> Tensor:
        """The value of one of its tensors."""
        return tensor if self.fetch is None else self.fetch(tensor)


def module_state(module: nn.Module, referenced: Collection[str] = ()) -> EngineState:
    """The tensors of this process except those in `referenced`; on the meta device are those of other processes."""
    model = module.state_dict()
    own = {name: tensor for name, tensor in model.items() if name not in referenced}
    return EngineState(_with_storage(own), _with_storage(nonpersistent_buffers(module, model)))


def load_module(module: nn.Module, state: EngineState, referenced: Collection[str] = ()) -> None:
    """The state must have exactly the module's names, shapes and dtypes; it may lack names in `referenced`."""
    check_state(module, state, referenced)
    load_tensors(module, state, [name for name in module_state(module).model if name in state.model])
    load_buffers(module, state)


def load_tensors(module: nn.Module, state: EngineState, names: Sequence[str]) -> None:
    """Load parameters and buffers; of a state that is read on demand, some at a time."""
    try:
        with warnings.catch_warnings():
            # A batch norm of another process, on the meta device, adds the count that it misses in the state.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
            # Every call of load_state_dict walks through the whole module.
            few = in_chunks(names, lambda name: state.model[name].nbytes, LOADED_BYTES)
            for some in [names] if state.fetch is None else few:
                module.load_state_dict({name: state.value(state.model[name]) for name in some}, strict=False)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise RunError(f"does not fit the model: {' '.join(str(error).split())}") from error


def load_buffers(module: nn.Module, state: EngineState) -> None:
    """Load the buffers of this process that a state_dict leaves out."""
    for name, buffer in module_state(module).buffers.items():
        buffer.copy_(state.value(state.buffers[name]))


def check_state(module: nn.Module, state: EngineState, referenced: Collection[str] = ()) -> None:
    """Raise RunError unless the tensors of the state are those of the module; it may lack names in `referenced`."""
    model = module.state_dict()
    absent = set(referenced) - state.model.keys()
    expected = {name: tensor for name, tensor in model.items() if name not in absent}
    _check_tensors("tensor", expected, state.model)
    _check_tensors("buffer", nonpersistent_buffers(module, model), state.buffers)
    match state.numbers.get("optimizer"):
        case {"without_state": [_, *_], "state": {**numbers}} if not (
            state.optimizer or numbers or state.resets_optimizer
        ):
            raise RunError("does not fit the optimizer: it has a state of no parameter at all")


def with_trained(state: EngineState, trained: Collection[str]) -> EngineState:
    """The state for an engine that trains other parameters than the engine that saved it.

    A parameter that was frozen starts without optimizer state, as all do in a new run.
    """
    saved = state.numbers.get("optimizer")
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return state  # the engine rejects it with a precise message
    tensors = {path: tensor for path, tensor in state.optimizer.items() if parameter_of(path) in trained}
    numbers = {name: values for name, values in saved["state"].items() if name in trained}
    with_state = {*map(parameter_of, tensors), *numbers}
    if not with_state:
        return replace(state, resets_optimizer=True)
    without = [name for name in trained if name not in with_state]
    optimizer = {**saved, "state": numbers, WITHOUT_STATE: without}
    return replace(state, optimizer=tensors, numbers={**state.numbers, "optimizer": optimizer})


def parameter_of(path: str) -> str:
    """The name of the parameter in the path of one of its optimizer tensors."""
    return path.rpartition("/")[0]


def nonpersistent_buffers(module: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers that the state_dict leaves out, also those of other processes."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in state_dict}


def _with_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


@final
class OptimizerState:
    """The state of one optimizer, by the names of its parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        make: MakeOptimizer,
    ) -> None:
        """make: what made the optimizer."""
        self._optimizer, self._names = optimizer, names
        self._initial_settings = _settings(optimizer)
        self._shapes = OptimizerStateShapes(make, self._named_parameters())

    def take(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by `parameter/key`, and numbers."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, values in self._optimizer.state.items():
            name = self._name(parameter)
            for key, value in values.items():
                _check_storable(self._optimizer, key, value)
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
        result = {"state": numbers, "groups": self._changed_settings()}
        without_state = [
            name
            for name, parameter in self._named_parameters()
            if self._shapes.of(parameter) and parameter not in self._optimizer.state
        ]
        return tensors, {**result, WITHOUT_STATE: without_state} if without_state else result

    def put(
        self,
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, Any],
        value: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Load what `take` returned, also the states of parameters that other processes train.

        value: reads the value of a tensor; called only for those of this optimizer.
        """
        groups = self._optimizer.state_dict()["param_groups"]
        states = _parameter_numbers(numbers)
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            states.setdefault(name, {})[key] = tensor
        self.check_names(states)
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for name, _ in self._named_parameters():
            if name in states:
                states[name] = {
                    key: value(entry) if isinstance(entry, Tensor) else entry
                    for key, entry in states[name].items()
                }
        state = {
            index: states[name]
            for index, parameter in enumerate(order)
            if (name := self._name(parameter)) in states
        }
        # Up to here nothing has changed: `groups` are copies that state_dict made, and a state that does not fit
        # raises.
        self._check(states, numbers)
        for group, changed in zip(groups, self._saved_settings(numbers), strict=True):
            group.update(changed)
        # By index, as torch wants it; snapshots hold names, because indices depend on the partitioning.
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._undo_rounding(order, state)

    def check_names(self, names: Iterable[str]) -> None:
        """Raise RunError unless each is a parameter that this or another process trains."""
        # A placeholder for an optimizer without parameters has the name "".
        if unknown := set(names) - (set(self._names.values()) - {""}):
            raise RunError(
                f"does not fit the model: it trains no {', '.join(sorted(unknown)[:5]) or repr('')}"
            )

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Without the placeholder, whose name is empty."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [(name, parameter) for parameter in parameters if (name := self._name(parameter))]

    def _check(self, states: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
        """Every parameter that has had a gradient needs the complete state that the optimizer keeps for one."""
        # An optimizer of torch has its complete state after the first update and never changes its own settings;
        # any other optimizer may add state later and change its settings.
        complete = optimizer_class(self._optimizer).__module__.startswith("torch.optim.")
        without = numbers.get(WITHOUT_STATE, [])
        if not isinstance(without, list) or any(
            states.get(name) for name in without if isinstance(name, str)
        ):
            raise RunError(
                f"does not fit the optimizer: its parameters without a state are {reprlib.repr(without)}"
            )
        # A resumed run may begin to average.
        begins = {OTHER_WEIGHTS} if not any(OTHER_WEIGHTS in values for values in states.values()) else set()
        for name, parameter in self._named_parameters():
            shapes = self._shapes.of(parameter)
            if shapes is not None and name not in without:
                expected = {key: value for key, value in shapes.items() if key not in begins}
                _check_parameter_state(name, expected, states.get(name, {}), complete=complete)
        for settings, changed in zip(_settings(self._optimizer), self._saved_settings(numbers), strict=True):
            added = {key: value for key, value in changed.items() if key not in EXCLUDED_SETTINGS}
            ours = {key: value for key, value in settings.items() if key == UPDATES}
            _check_settings(ours if complete else {**added, **settings}, changed)
            _check_count(UPDATES, changed.get(UPDATES, 0))

    def _saved_settings(self, numbers: Mapping[str, Any]) -> Groups:
        """What the optimizer changed in each group; a resumed run may have stopped to average."""
        now = self._optimizer.param_groups
        return [
            {key: value for key, value in changed.items() if key != UPDATES or key in group}
            for group, changed in zip(now, _group_numbers(numbers, len(now)), strict=True)
        ]

    def _undo_rounding(self, order: list[nn.Parameter], state: Mapping[int, Mapping[str, Any]]) -> None:
        """torch casts the state to its parameter's dtype, even where the optimizer chose a more precise one."""
        for index, values in state.items():
            loaded = self._optimizer.state[order[index]]
            for key, value in values.items():
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _changed_settings(self) -> Groups:
        """Settings that the optimizer itself changed; the others come from the configuration, which may change."""
        changed = [
            {key: value for key, value in now.items() if value != initial.get(key)}
            for now, initial in zip(_settings(self._optimizer), self._initial_settings, strict=True)
        ]
        for key, value in (item for group in changed for item in group.items()):
            _check_storable(self._optimizer, key, value)
        return changed

    def _name(self, parameter: Any) -> str:
        if parameter not in self._names:
            raise ConfigError(
                f"{_title(self._optimizer)}: has state that belongs to no parameter, which cannot be saved"
            )
        return self._names[parameter]


def check_optimizer(make: MakeOptimizer) -> None:
    """Try the optimizer on a dummy parameter: state that cannot be saved is an error now, not at the first save."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = make([("parameter", parameter)])
    try:
        optimizer.step()
    except Exception as error:  # it may reject the dummy gradient, and still train
        if "dense gradients" in str(error):  # of torch.optim.SparseAdam
            raise ConfigError(
                f"{_title(optimizer)}: {error}, and layers have no others here; choose another optimizer"
            ) from error
        return
    OptimizerState(optimizer, {parameter: "parameter"}, make).take()


def merged_numbers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of several optimizers, each for its part of a model; their settings and steps are the same."""
    merged = {
        "state": dict(item for part in parts for item in part["state"].items()),
        "groups": parts[0]["groups"],
    }
    without_state = dict.fromkeys(name for part in parts for name in part.get(WITHOUT_STATE, ()))
    return {**merged, WITHOUT_STATE: list(without_state)} if without_state else merged


def merged_engine_numbers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the states of several processes; all but those of the optimizer are the same."""
    first, *others = parts
    if not others or "optimizer" not in first:
        return dict(first)
    return {**first, "optimizer": merged_numbers([part["optimizer"] for part in parts])}


def _check_storable(optimizer: torch.optim.Optimizer, key: Any, value: Any) -> None:
    plain = isinstance(value, STORABLE_TYPES) or (isinstance(value, Tensor) and value.layout is torch.strided)
    if not plain or not isinstance(key, str) or "/" in key:
        raise ConfigError(
            f"{_title(optimizer)}: its state {key!r} is a {type(value).__name__}, which cannot be saved and "
            "resumed from; choose another optimizer"
        )


def _parameter_numbers(numbers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A copy of each parameter's numbers; they come from a file, so their form is checked first."""
    match numbers:
        case {"state": dict(state), "groups": [_, *_] as changed}:
            if all(isinstance(entry, dict) for entry in (*state.values(), *changed)):
                return {name: dict(values) for name, values in state.items()}
    raise RunError("does not fit the optimizer: it has no state of an optimizer with parameter groups")


def _group_numbers(numbers: Mapping[str, Any], count: int) -> Groups:
    """The settings that the optimizer changed in each of `count` groups.

    A resumed run may have other groups, unless their settings differ: it would not be known which are whose.
    """
    groups: Groups = numbers["groups"]
    if len(groups) == count:
        return groups
    if any(group != groups[0] for group in groups):
        raise RunError(
            f"does not fit the optimizer: its {len(groups)} parameter groups have different settings, and now there "
            f"are {count} groups; resume with the optimizer.groups and optimizer.no_decay of the run"
        )
    return groups[:1] * count


def _settings(optimizer: torch.optim.Optimizer) -> Groups:
    return [
        {key: deepcopy(value) for key, value in group.items() if key not in EXCLUDED_SETTINGS}
        for group in optimizer.param_groups
    ]


def _title(optimizer: torch.optim.Optimizer) -> str:
    kind = optimizer_class(optimizer)
    return f"optimizer._target_={kind.__module__}.{kind.__qualname__}"


def _check_tensors(kind: str, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Require the same names, shapes and dtypes."""
    if missing := expected.keys() - given.keys():
        raise RunError(f"does not fit the model: it has no {kind} {_some(missing)}")
    if unexpected := given.keys() - expected.keys():
        raise RunError(f"does not fit the model, which has no {kind} {_some(unexpected)}")
    for name, tensor in expected.items():
        if not _alike(tensor, given[name]):
            raise RunError(
                f"does not fit the model: {kind} {name} is {_outline(given[name])} instead of {_outline(tensor)}"
            )


def _check_parameter_state(
    name: str, expected: Mapping[str, Any], given: Mapping[str, Any], *, complete: bool
) -> None:
    """Check the optimizer state of one parameter; complete: the optimizer never has more than expected."""
    hint = "; resume with the optimizer settings of the run, or give reset_optimizer=true"
    if missing := expected.keys() - given.keys():
        raise RunError(f"does not fit the optimizer: it has no {_some(missing)} of {name}{hint}")
    if complete and (unexpected := given.keys() - expected.keys()):
        raise RunError(f"does not fit the optimizer, which keeps no {_some(unexpected)} of {name}{hint}")
    for key, value in given.items():
        _check_value(f"{name}/{key}", value if expected.get(key) is None else expected[key], value)


def _check_settings(expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Require known names, each with a value of the expected kind."""
    for key, value in given.items():
        if key not in expected:
            raise RunError(f"does not fit the optimizer, which never changes {reprlib.repr(key)} itself")
        _check_value(key, expected[key], value)


def _check_value(path: str, expected: Any, given: Any) -> None:
    """Require the kind of value that is expected; torch would silently train on with a step count that is none."""
    if isinstance(expected, Tensor) and isinstance(given, Tensor):
        if not _alike(expected, given):
            raise RunError(
                f"does not fit the optimizer: {path} is {_outline(given)} instead of {_outline(expected)}"
            )
        if given.dim() > 0 or given.is_meta or not given.is_floating_point():
            return
    elif _kind(given) not in _KINDS or (expected is not None and _kind(given) != _kind(expected)):
        raise RunError(
            f"does not fit the optimizer: {path} is {reprlib.repr(given)}, not a {_kind(expected)}"
        )
    number = given.item() if isinstance(given, Tensor) else given
    is_finite = not isinstance(number, float) or math.isfinite(number)
    if not is_finite or (path.endswith(_COUNT) and isinstance(number, int | float) and number < 0):
        raise RunError(f"does not fit the optimizer: {path} is {number}")


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise RunError(f"does not fit the optimizer: {key} is {reprlib.repr(value)}, not a count")


def check_scaler(expected: Mapping[str, Any], given: Any) -> None:
    """Check the loss scale: all values are positive, except that the count of steps since the last change may be 0."""
    if not isinstance(given, dict) or given.keys() != expected.keys():
        raise RunError(f"does not fit the loss scaler: {reprlib.repr(given)}")
    for key, value in given.items():
        counts = isinstance(expected[key], int)
        known = (
            type(value) is int if counts else isinstance(value, int | float) and not isinstance(value, bool)
        )
        if not known or not 0 <= value < 2.0**127 or (value == 0 and not counts):
            raise RunError(f"does not fit the loss scaler: {key} is {reprlib.repr(value)}")


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype


def _outline(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a single number"
    return f"{shape} of {str(tensor.dtype).removeprefix('torch.')}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "nothing" if value is None else "list of values"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(reprlib.repr, ordered[:_MAX_NAMES])) + (", ..." if len(ordered) > _MAX_NAMES else "")
