"""The optimizer of a run: a function that makes one for any part of the model, with its parameter groups.

`no_decay` and `groups` are the keys of `optimizer` that divide the parameters into groups; `rounding` and `master` say
how parameters in half precision are updated.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.config.instantiate import instantiate
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.distributed.replica_assignment import largest_share
from gpipe_cli.engines.half_precision import NEAREST, ROUNDINGS, HalfPrecisionOptimizer, is_half
from gpipe_cli.engines.parameters import average_weights
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.memory import KeptState, MakeOptimizer, NamedParameters, whole_state
from gpipe_cli.sequential.selection import select_parameters

NO_DECAY, GROUPS = "no_decay", "groups"
ROUNDING, MASTER = "rounding", "master"
MATCH, LR_SCALE = "match", "lr_scale"
EXAMPLE = "[{match: head, lr_scale: 10}]"
NORM, BIAS = "norm", "bias"
"""Words that stand for kinds of parameters, in any model."""


@final
@dataclass(frozen=True)
class ParameterGroups:
    """How the parameters of a model are divided among the groups of an optimizer.

    Every optimizer of a run has all groups, even one for a part of the model that has no parameter of a group: so the
    settings that an optimizer changes itself are saved by the same index, however the model is divided.
    """

    options: Sequence[Mapping[str, Any]]
    """The options of each group, as torch takes them, and its lr_scale."""
    indices: Mapping[str, int]
    """The group of each trained parameter, by its name."""

    def divide(self, parameters: NamedParameters) -> list[Any]:
        """The parameters as torch's optimizers take them; a parameter of another name is in the first group."""
        if self.options == [{}]:  # as simple as any optimizer can take it
            return [parameter for _, parameter in parameters]
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in self.options]
        for name, parameter in parameters:
            groups[self.indices.get(name, 0)]["params"].append(parameter)
        return groups


def parameter_groups(node: Mapping[str, Any], model: nn.Sequential) -> ParameterGroups:
    """The groups that `optimizer.no_decay` and `optimizer.groups` ask for; without them a single one."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    asked: list[Mapping[str, Any]] = node.get(GROUPS) or []
    own = dict.fromkeys(trained, -1)
    for index, group in enumerate(asked):
        key = f"optimizer.{GROUPS}[{index}].match"
        matched = _select(model, group_patterns(group), key) & trained
        # The first group that matches a parameter has it.
        if not (added := {name for name in matched if own[name] < 0}):
            reason = "is in an earlier group" if matched else "is frozen"
            raise ConfigError(f"{key}={group['match']}: every parameter that it matches {reason}; remove it")
        own |= dict.fromkeys(added, index)
    no_decay = _select(model, node.get(NO_DECAY) or [], f"optimizer.{NO_DECAY}", may_lack=(NORM, BIAS))
    options: list[Mapping[str, Any]] = []
    indices: dict[str, int] = {}
    for index, group in enumerate([{}, *asked], start=-1):
        for decays in (True, False):
            members = [name for name in trained if own[name] == index and (name not in no_decay) == decays]
            own_options = _as_torch_takes_it(group, decays=decays)
            if members and own_options not in options:
                options.append(own_options)
            indices |= {name: options.index(own_options) for name in members}
    return ParameterGroups(options or [{}], indices)


def _as_torch_takes_it(group: Mapping[str, Any], *, decays: bool) -> dict[str, Any]:
    scale = {LR_SCALE: group[LR_SCALE]} if LR_SCALE in group else {}
    return {**({} if decays else {"weight_decay": 0.0}), **scale, **group_options(group)}


def _select(
    model: nn.Sequential, patterns: Sequence[str], key: str, may_lack: Sequence[str] = ()
) -> set[str]:
    """The names of the parameters that the patterns and words match; a word in `may_lack` may match none."""
    words = {NORM: _is_norm, BIAS: _is_bias}
    others = [pattern for pattern in patterns if pattern not in words]
    names = set(select_parameters(model, others, key, words))
    for word in words.keys() & set(patterns):
        of_kind = {
            parameter
            for module in model.modules()
            for own, parameter in module.named_parameters(recurse=False)
            if words[word](module, own)
        }
        if not of_kind and word not in may_lack:
            raise ConfigError(f"{key}={word}: the model has no such parameter")
        names |= {name for name, parameter in model.named_parameters() if parameter in of_kind}
    return names


def _is_norm(module: nn.Module, name: str) -> bool:
    """By the names of its classes, because models of other libraries have their own: LlamaRMSNorm, LayerNorm2d."""
    return any(re.search(r"Norm(\dd)?$", base.__name__) for base in type(module).__mro__)


def _is_bias(module: nn.Module, name: str) -> bool:
    """Including `in_proj_bias` of attention and `bias_ih_l0` of recurrent layers."""
    return BIAS in name.split("_")


def optimizer_factory(settings: ModelConfig, model: nn.Sequential) -> MakeOptimizer:
    """Makes the optimizer of the whole model or of any part of it, with equal groups."""
    groups = parameter_groups(settings.optimizer, model)
    node = optimizer_arguments(settings.optimizer)
    ema = settings.ema
    if ema is not None:
        _check_precision(ema, model)
    rounds = _updates_half_precision(settings, model)

    def make_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
        named = list(parameters)
        optimizer: torch.optim.Optimizer = instantiate(
            node, "optimizer", settings.allow, params=groups.divide(named)
        )
        for problem in _problems(optimizer, settings.optimizer):
            raise ConfigError(problem)
        if rounds:
            names = {parameter: name for name, parameter in named}
            return HalfPrecisionOptimizer(optimizer, names, master=bool(settings.optimizer.get(MASTER)))
        if ema is not None:
            average_weights(optimizer, ema)
        return optimizer

    return make_optimizer


def kept_state(settings: ModelConfig) -> KeptState:
    """How much of the optimizer's state each replica keeps."""
    if settings.shard == "optimizer":
        return partial(largest_share, replicas=settings.data_parallel)
    return whole_state


def _updates_half_precision(settings: ModelConfig, model: nn.Sequential) -> bool:
    """Whether the update of trained parameters in half precision is computed in float32."""
    node = settings.optimizer
    # A run of an earlier version, and an optimizer named by _target_, have neither key.
    rounds_to_nearest, master = node.get(ROUNDING, NEAREST) == NEAREST, bool(node.get(MASTER))
    half = {each.dtype for each in model.parameters() if each.requires_grad and is_half(each)}
    if settings.precision != "fp16" and any(each.dtype == torch.float16 for each in model.parameters()):
        raise ConfigError(
            "model.dtype=float16: gradients in float16 vanish without a loss scale; set precision=fp16, or "
            "model.dtype=bfloat16"
        )
    if rounds_to_nearest and not master and torch.float16 in half:
        raise ConfigError(
            f"optimizer.{ROUNDING}=nearest: float16 parameters need an update in float32; set "
            f"optimizer.{ROUNDING}=stochastic or optimizer.{MASTER}=true"
        )
    if master and not half:
        raise ConfigError(
            f"optimizer.{MASTER}=true: keeps a float32 copy of parameters in half precision, and the model "
            "trains none; remove it, or set model.dtype=bfloat16"
        )
    if node.get(ROUNDING) == NEAREST and (master or not half):
        reason = (
            f"optimizer.{MASTER}=true rounds its copy"
            if master
            else "the model trains none in half precision"
        )
        raise ConfigError(
            f"optimizer.{ROUNDING}={NEAREST}: is for updates of parameters in half precision, and {reason}; remove it"
        )
    return bool(half) and (master or not rounds_to_nearest)


def _check_precision(ema: float, model: nn.Module) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    for dtype in dtypes & {torch.bfloat16, torch.float16}:
        raise ConfigError(
            f"ema={ema:g}: the model's parameters are {str(dtype).removeprefix('torch.')}, too coarse for an average; "
            "keep them in float32 and set precision=bf16 instead"
        )


def _problems(optimizer: torch.optim.Optimizer, node: Mapping[str, Any]) -> Iterator[str]:
    name = type(optimizer).__name__
    required = [
        parameter.name
        for parameter in inspect.signature(optimizer.step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if required:
        yield (
            f"optimizer: the step of {name} needs a {required[0]}, which gpipe does not pass, "
            "because the pipeline computes the gradients once per step; choose another optimizer"
        )
    # torch keeps any key in a group, but an optimizer only reads from it what has a default for all groups.
    for index, group in enumerate(node.get(GROUPS) or []):
        for key in group_options(group).keys() - optimizer.defaults.keys():
            yield f"optimizer.{GROUPS}[{index}].{key}: {name} has one value for all parameters; remove it"
    if node.get(NO_DECAY) and "weight_decay" not in optimizer.defaults:
        yield f"optimizer.{NO_DECAY}={node[NO_DECAY]}: {name} has no weight_decay; remove it"


def optimizer_arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """The `optimizer` node without the keys that gpipe uses itself."""
    return {key: value for key, value in node.items() if key not in (NO_DECAY, GROUPS, ROUNDING, MASTER)}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says about the optimizer: everything except which parameters and their learning rate."""
    return {key: value for key, value in group.items() if key not in (MATCH, LR_SCALE)}


def group_patterns(group: Mapping[str, Any]) -> list[str]:
    match = group[MATCH]
    return [match] if isinstance(match, str) else list(match)


def key_problems(node: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the form of the keys that gpipe uses itself."""
    rounding, master = node.get(ROUNDING, NEAREST), node.get(MASTER, False)
    if rounding not in ROUNDINGS:
        yield f"optimizer.{ROUNDING}={rounding}: must be one of: {', '.join(ROUNDINGS)}"
    if not isinstance(master, bool):
        yield f"optimizer.{MASTER}={master}: must be true or false"
    no_decay, groups = node.get(NO_DECAY), node.get(GROUPS)
    if no_decay is not None and not _is_list_of_names(no_decay):
        yield f"optimizer.{NO_DECAY}={no_decay}: must be a list of names, such as [norm,bias], or []"
    if groups is None:
        return
    if not isinstance(groups, list):
        yield f"optimizer.{GROUPS}={groups}: must be a list such as {EXAMPLE}"
        return
    for index, group in enumerate(groups):
        key = f"optimizer.{GROUPS}[{index}]"
        if not isinstance(group, Mapping) or MATCH not in group:
            yield f"{key}={group}: must say which parameters it is for, such as {EXAMPLE[1:-1]}"
        else:
            yield from _problems_of_group(key, group)


def _problems_of_group(key: str, group: Mapping[str, Any]) -> Iterator[str]:
    match, scale = group[MATCH], group.get(LR_SCALE, 1)
    if not isinstance(match, str) and not (_is_list_of_names(match) and match):
        yield f"{key}.{MATCH}={match}: must be a name or a list of names"
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not scale > 0:
        yield f"{key}.{LR_SCALE}={scale}: must be a positive number"
    if "lr" in group:
        yield f"{key}.lr={group['lr']}: the schedule decides the learning rate; give {LR_SCALE}, a factor of it"
    for name in group_options(group):  # those of the optimizer are checked when it is made
        if close := get_close_matches(name, (MATCH, LR_SCALE), n=1, cutoff=0.8):
            yield f"unknown key '{key}.{name}'; did you mean '{close[0]}'?"
    if len(group) == 1:
        yield f"{key}: changes nothing; give {LR_SCALE}, weight_decay or another option of the optimizer"
    for name in ("params", "_target_"):
        if name in group:
            yield f"unknown key '{key}.{name}'; remove it"


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)
