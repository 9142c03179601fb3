"""Everything a training step changes in an engine, under the original model's names: taken out, and put back.

Names instead of positions, so that a state knows nothing of partitions. The learning rate is not part of it: that
is a function of the step. Knows nothing of files; it sees to it that all it gives fits into safetensors and JSON.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.engines.state_check import check_kept, check_numbers, check_tensors
from gpipe_cli.errors import ConfigError, RunError
from gpipe_cli.profiling.optimizer_state import OptimizerStateShapes

NUMBERS = (bool, int, float, str, type(None))
NOT_ITS_OWN = ("params", "lr")
"""Among the settings of a group: what the model and the schedule of the learning rate decide."""
IDLE = "without_state"
"""Among an optimizer's numbers: parameters it keeps nothing of, since they never had a gradient."""
Groups = list[dict[str, Any]]


@final
@dataclass(frozen=True)
class EngineState:
    """Tensors are the engine's own: copy them before the next step."""

    model: dict[str, Tensor]
    """The state_dict: parameters and buffers."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers that a state_dict leaves out."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """By `parameter/key`, such as `conv1.weight/exp_avg`."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The rest, as JSON: what the optimizer keeps besides tensors, and the loss scale."""
    resets_optimizer: bool = False
    """Whether the optimizer of an engine that loads it begins anew."""
    fetch: Callable[[Tensor], Tensor] | None = None
    """For a state that may be larger than memory, gives the numbers of one of its tensors, which has none itself."""

    def value(self, tensor: Tensor) -> Tensor:
        """The numbers of one of its tensors."""
        return tensor if self.fetch is None else self.fetch(tensor)


def module_state(module: nn.Module) -> EngineState:
    """What is here: tensors on the meta device are in other processes."""
    model = module.state_dict()
    return EngineState(_stored(model), _stored(_left_out(module, model)))


def load_module(module: nn.Module, state: EngineState) -> None:
    """Every name must be there, and no other, in the same shape and dtype."""
    check_state(module, state)
    try:
        with warnings.catch_warnings():
            # What belongs to other processes is compared in name and shape, and not stored.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
            module.load_state_dict(state.model)
    except RuntimeError as error:
        raise RunError(f"does not fit the model: {' '.join(str(error).split())}") from error
    for name, buffer in _left_out(module, module.state_dict()).items():
        buffer.copy_(state.buffers[name])


def check_state(module: nn.Module, state: EngineState) -> None:
    """Whether its tensors are the module's."""
    model = module.state_dict()
    check_tensors("tensor", model, state.model)
    check_tensors("buffer", _left_out(module, model), state.buffers)
    match state.numbers.get("optimizer"):
        case {"without_state": [_, *_], "state": {**numbers}} if not (
            state.optimizer or numbers or state.resets_optimizer
        ):
            raise RunError("does not fit the optimizer: it has a state of no parameter at all")


def _left_out(module: nn.Module, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in module.named_buffers() if name not in kept}


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if not one.is_meta}


@final
class OptimizerState:
    """What one optimizer keeps, by the names of its parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        outlines: OptimizerStateShapes,
    ) -> None:
        self._optimizer, self._names, self._outlines = optimizer, names, outlines
        self._at_first = _settings(optimizer)

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
        found = {"state": numbers, "groups": self._moved()}
        idle = [
            name
            for name, one in self._trained()
            if self._outlines.of(one) and one not in self._optimizer.state
        ]
        return tensors, {**found, IDLE: idle} if idle else found

    def put(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from what `take` gave."""
        groups = self._optimizer.state_dict()["param_groups"]
        found = _checked(numbers, len(groups))
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            found.setdefault(name, {})[key] = tensor
        if unknown := found.keys() - (
            set(self._names.values()) - {""}
        ):  # the name of a parameter that stands in
            raise RunError(
                f"does not fit the model: it trains no {', '.join(sorted(unknown)[:5]) or repr('')}"
            )
        order = [one for group in self._optimizer.param_groups for one in group["params"]]
        state = {index: found[self._name(one)] for index, one in enumerate(order) if self._name(one) in found}
        self._check(found, numbers)
        for group, moved in zip(groups, numbers["groups"], strict=True):
            group.update(moved)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._undo_rounding(order, state)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Its parameters by name; one without a name only stands in for none."""
        own = (one for group in self._optimizer.param_groups for one in group["params"])
        return [(name, one) for one in own if (name := self._name(one))]

    def _check(self, found: Mapping[str, Mapping[str, Any]], numbers: Mapping[str, Any]) -> None:
        """Every parameter that has had a gradient has all that the optimizer keeps of one."""
        # An optimizer of torch keeps from its first update on all it ever will, and changes none of its settings;
        # another may do both.
        complete = type(self._optimizer).__module__.startswith("torch.optim.")
        idle = numbers.get(IDLE, [])
        if not isinstance(idle, list) or any(found.get(name) for name in idle if isinstance(name, str)):
            raise RunError(
                f"does not fit the optimizer: its parameters without a state are {reprlib.repr(idle)}"
            )
        for name, parameter in self._trained():
            expected = self._outlines.of(parameter)
            if expected is not None and name not in idle:
                check_kept(name, expected, found.get(name, {}), complete=complete)
        for settings, moved in zip(_settings(self._optimizer), numbers["groups"], strict=True):
            added = {key: value for key, value in moved.items() if key not in NOT_ITS_OWN}
            check_numbers({} if complete else {**added, **settings}, moved)

    def _undo_rounding(self, order: list[nn.Parameter], state: Mapping[int, Mapping[str, Any]]) -> None:
        """torch gives state the dtype of its parameter, even where the optimizer chose a finer one."""
        for index, values in state.items():
            loaded = self._optimizer.state[order[index]]
            for key, value in values.items():
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)

    def _moved(self) -> Groups:
        """Settings the optimizer changed by itself; the others are the configuration's, which may change."""
        moved = [
            {key: value for key, value in now.items() if value != first.get(key)}
            for now, first in zip(_settings(self._optimizer), self._at_first, strict=True)
        ]
        for key, value in (item for group in moved for item in group.items()):
            _check_storable(self._optimizer, key, value)
        return moved

    def _name(self, parameter: Any) -> str:
        if parameter not in self._names:
            raise ConfigError(f"{_title(self._optimizer)}: keeps state of no parameter; it cannot be saved")
        return self._names[parameter]


def check_optimizer(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
    """Say at the start, on a parameter of no importance, what would only fail at the first save."""
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = make([parameter])
    try:
        optimizer.step()
    except Exception:  # noqa: BLE001 - it may want other gradients than these; training itself will tell
        return
    OptimizerState(optimizer, {parameter: "parameter"}, OptimizerStateShapes(make)).take()


def merged_numbers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several optimizers keep of their own parts of a model; they have seen the same settings and steps."""
    merged = {
        "state": dict(item for one in parts for item in one["state"].items()),
        "groups": parts[0]["groups"],
    }
    idle = dict.fromkeys(name for one in parts for name in one.get(IDLE, ()))
    return {**merged, IDLE: list(idle)} if idle else merged


def _check_storable(optimizer: torch.optim.Optimizer, key: Any, value: Any) -> None:
    plain = isinstance(value, NUMBERS) or (isinstance(value, Tensor) and value.layout is torch.strided)
    if not plain or not isinstance(key, str) or "/" in key:
        raise ConfigError(
            f"{_title(optimizer)}: its state {key!r} is a {type(value).__name__}, which cannot be saved and "
            "resumed from; choose another optimizer"
        )


def _checked(numbers: Mapping[str, Any], groups: int) -> dict[str, dict[str, Any]]:
    """The numbers of each parameter, copied; what a file says of them is not believed before it is seen."""
    match numbers:
        case {"state": dict(state), "groups": list(moved)} if len(moved) == groups:
            if all(isinstance(one, dict) for one in (*state.values(), *moved)):
                return {name: dict(values) for name, values in state.items()}
    raise RunError("does not fit the optimizer: it holds no state of one with these groups")


def _settings(optimizer: torch.optim.Optimizer) -> Groups:
    return [
        {key: deepcopy(value) for key, value in group.items() if key not in NOT_ITS_OWN}
        for group in optimizer.param_groups
    ]


def _title(optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer._target_={type(optimizer).__module__}.{type(optimizer).__qualname__}"
