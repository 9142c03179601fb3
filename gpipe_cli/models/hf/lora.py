"""LoRA by peft: freeze a model of transformers and train small matrices beside some of its layers.

The adapters are injected into the model itself, so every parameter keeps its name but for `.base_layer` in an adapted
layer: `model.layers.0.self_attn.q_proj.base_layer.weight`, `...q_proj.lora_A.default.weight`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.errors import ConfigError, did_you_mean
from gpipe_cli.huggingface import import_package
from gpipe_cli.values import check_whole_number

ADAPTER = "default"
"""peft's name for the adapter, which is part of the names of its parameters."""
ALL_LINEAR = "all-linear"


@final
@dataclass(frozen=True)
class LoraSettings:
    """The keys of `model.lora`."""

    rank: int
    targets: tuple[str, ...] | str | None = None
    """The last parts of the names of the layers to adapt; None: peft's choice for the architecture."""
    alpha: float | None = None
    """None: twice the rank."""
    dropout: float = 0.0

    @staticmethod
    def of(node: Mapping[str, Any] | None) -> LoraSettings | None:
        """The settings in a configuration; None if it asks for no adapters."""
        given = {key: value for key, value in (node or {}).items() if value is not None}
        known = [field.name for field in fields(LoraSettings)]
        if unknown := [key for key in given if key not in known]:
            raise ConfigError(
                f"model.lora.{unknown[0]}: unknown key; {did_you_mean(unknown[0], known) or known}"
            )
        if "rank" not in given:
            if needless := [key for key in given if key != "dropout"]:
                raise ConfigError(
                    f"model.lora.{needless[0]}={given[needless[0]]}: needs model.lora.rank; give it, such as 8"
                )
            return None
        check_whole_number("model.lora.rank", given["rank"], least=1)
        alpha, dropout = given.get("alpha", 2 * given["rank"]), given.get("dropout", 0.0)
        if not _is_number(alpha) or alpha <= 0:
            raise ConfigError(f"model.lora.alpha={alpha}: must be a number greater than 0")
        if not _is_number(dropout) or not 0 <= dropout < 1:
            raise ConfigError(f"model.lora.dropout={dropout}: must be a number from 0 to below 1")
        return LoraSettings(given["rank"], _targets(given.get("targets")), alpha, dropout)


def add_adapters(
    model: nn.Module,
    settings: LoraSettings,
    trained: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Freeze the model except for the parameters in `trained`, and add adapters, drawn from the default generator.

    say: prints what peft warns of.
    """
    peft = import_package("peft")
    config = lora_config(model, settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # On the meta device, without values: the base may be there too, and peft would move the adapters to it.
            peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(
                f"model.lora.targets={_text(settings.targets)}: {' '.join(str(error).split())}"
            ) from error
    for warning in caught:
        say(f"peft: {' '.join(str(warning.message).split())}")
    for layer in adapted_layers(model).values():
        _initialize(layer)
    for name, parameter in model.named_parameters():
        if name in trained:
            parameter.requires_grad_(True)


def lora_config(model: nn.Module, settings: LoraSettings, trained: Collection[str] = ()) -> Any:
    """The configuration of peft, as an exported adapter has it; `trained` are modules that are trained whole."""
    peft = import_package("peft")
    targets = settings.targets
    if targets is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        if kind not in known:
            raise ConfigError(
                f"model.lora.targets: peft knows no default for {kind}; give some of: {', '.join(_layer_names(model))}"
            )
        targets = tuple(known[kind])
    if targets != ALL_LINEAR:
        _check_targets(model, targets)
    return peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=_are_transposed(model, targets),
        modules_to_save=list(trained) or None,
    )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    kind = import_package("peft").tuners.lora.LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def _initialize(layer: Any) -> None:
    """Give the adapter of a layer storage and values, by peft's rules: the product of its matrices is zero."""
    for part in layer.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.requires_grad:
                # In float32 whatever the base has, as peft itself trains them: small updates would be rounded away.
                value = torch.empty(parameter.shape, dtype=torch.float32)
                replacement = nn.Parameter(value)
                if isinstance(part, nn.ParameterDict):
                    part[name] = replacement
                else:
                    setattr(part, name, replacement)
    layer.reset_lora_parameters(ADAPTER, True)


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    names = _layer_names(model)
    for target in targets:
        if not any(_matches(name, target) for name, _ in _matrix_layers(model)):
            suggestion = did_you_mean(target, names) or f"give some of: {', '.join(names)}"
            raise ConfigError(
                f"model.lora.targets={target}: the model has no layer of that name with a matrix; {suggestion}"
            )


def _layer_names(model: nn.Module) -> list[str]:
    """The last parts of the names of layers with a matrix, once each."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name, _ in _matrix_layers(model)))


def _matrix_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name and isinstance(weight, nn.Parameter) and weight.dim() >= 2:
            yield name, module


def _are_transposed(model: nn.Module, targets: Sequence[str] | str) -> bool:
    """Whether the targets are of transformers' Conv1D, which has the transposed weight of a linear layer."""
    adapted = (
        module
        for name, module in _matrix_layers(model)
        if targets == ALL_LINEAR or any(_matches(name, target) for target in targets)
    )
    return any(type(module).__name__ == "Conv1D" for module in adapted)


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _targets(given: Any) -> tuple[str, ...] | str | None:
    if given is None:
        return None
    if given == ALL_LINEAR:
        return ALL_LINEAR
    members = [given] if isinstance(given, str) else given
    if isinstance(members, Sequence) and members and all(isinstance(member, str) for member in members):
        return tuple(members)
    raise ConfigError(
        f"model.lora.targets={given}: must be a list of names of layers, such as [q_proj,v_proj], or {ALL_LINEAR}"
    )


def _text(targets: tuple[str, ...] | str | None) -> str:
    return targets if isinstance(targets, str) else f"[{','.join(targets or ())}]"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
