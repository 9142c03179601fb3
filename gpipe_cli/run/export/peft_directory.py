"""format=peft: the adapter of a run, as a directory that `PeftModel.from_pretrained(base, directory)` loads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.models.hf.lora import ADAPTER, LoraSettings, lora_config
from gpipe_cli.run.base_weights import base_of_snapshot, check_base
from gpipe_cli.run.export.hf_directory import TrainedModel, read_tensors, whole_directory
from gpipe_cli.training.snapshot.manifest import VerifiedSnapshot
from gpipe_cli.training.snapshot.tensors import encode

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft has the model as `base_model.model` of its own."""
TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
}
"""peft's names; it has none for the other tasks, and needs none."""


def write(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """Write the adapter of the snapshot and its configuration; both, or nothing."""
    trained = TrainedModel.of(snapshot, "peft")
    settings = LoraSettings.of(trained.node.get("lora"))
    base = base_of_snapshot(snapshot)
    if settings is None or base is None:
        raise ConfigError(
            f"format=peft: {trained.run} has no adapter of a base model in files (model.lora.rank); give format=hf"
        )
    check_base(base, trained.node, snapshot.path, contents=False)
    tensors = read_tensors(snapshot)
    model, task = trained.without_values(tensors)
    parameters = {name for name, _ in model.named_parameters()}
    config = lora_config(model, settings, whole_modules(model, parameters & tensors.keys()))
    config.base_model_name_or_path = str(trained.path)
    config.inference_mode = True
    config.task_type = TASK_TYPES.get(task)
    # Buffers of the base are not among them: peft has no place for them in an adapter.
    adapter = {
        PREFIX + (name if name in parameters else _without_adapter_name(name)): tensor
        for name, tensor in tensors.items()
        if name in parameters or "lora_" in name
    }
    with whole_directory(out) as folder:
        config.save_pretrained(str(folder))
        with (folder / WEIGHTS).open("wb") as file:
            file.writelines(encode(adapter))
    return {"bytes": sum(file.stat().st_size for file in out.iterdir()), "base": str(trained.path)}


def whole_modules(model: nn.Module, trained: Collection[str]) -> list[str]:
    """The largest modules of which every parameter is among `trained`."""
    modules: list[str] = []
    for name, module in model.named_modules():
        own = [f"{name}.{key}" for key, _ in module.named_parameters()]
        inside = any(name.startswith(f"{outer}.") for outer in modules)
        if name and own and not inside and all(key in trained for key in own):
            modules.append(name)
    return modules


def _without_adapter_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != ADAPTER)
