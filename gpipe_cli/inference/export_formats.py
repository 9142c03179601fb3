"""The formats of `gpipe export`, which load without gpipe.

safetensors  a file of weights, with what predictions need as metadata and as JSON beside the file
hf           a directory that `from_pretrained` loads, with configuration, weights and tokenizer; transformers
             itself writes it, so the files have the names, shards and layout of published models
             (merge=true: of a run with an adapter, the base with the adapter added)
peft         the adapter of a run, as a directory that `PeftModel.from_pretrained(base, directory)` loads
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.huggingface import MAX_JSON_BYTES, import_package, load_config
from gpipe_cli.inference.inference_spec import METADATA_KEY, SPEC_FILE, spec_of_run
from gpipe_cli.models.hf import pretrained
from gpipe_cli.models.hf.lora import ADAPTER, LoraSettings, lora_config
from gpipe_cli.models.hf.pretrained import (
    CLASSIFICATION,
    TEXT_CLASSES,
    model_class,
    set_classes,
    set_padding,
)
from gpipe_cli.models.weights import fitted_weights
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.saved import saved_config, weights_file
from gpipe_cli.runs.snapshots import durable
from gpipe_cli.runs.snapshots.contents import decode_tensors, open_large_snapshot
from gpipe_cli.runs.snapshots.manifest import MODEL, VerifiedSnapshot, run_directory_of
from gpipe_cli.runs.snapshots.record import base_of_snapshot, check_base
from gpipe_cli.safe_files import read_regular
from gpipe_cli.tensor_files.tensor_file import encode

TARGET = f"{pretrained.__name__}.build"
MAX_SHARD = "5GB"
COPIED = """
    tokenizer*.json tokenizer.model *.tiktoken vocab.json vocab.txt merges.txt spiece.model sentencepiece*.model
    special_tokens_map.json added_tokens.json chat_template.* preprocessor_config.json processor_config.json
    generation_config.json
"""
"""Files beside configuration and weights that belong to a model: tokenizer, preprocessing and generation."""
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft has the model as `base_model.model` of its own."""
TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
}
"""peft's names; it has none for the other tasks, and needs none."""


def write_file(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """Write the weights of the snapshot; nothing is replaced."""
    if base_of_snapshot(snapshot) is not None:
        raise ConfigError(
            f"format=safetensors: {snapshot.path} has only the adapter of a model; give format=peft out=<directory>"
        )
    weights, run = decode_tensors(snapshot, MODEL), run_directory_of(snapshot.path)
    spec = spec_of_run(run)
    beside = out.with_suffix(".json")
    if spec is None:
        print_status(
            f"{run}: has no {SPEC_FILE}, because an older gpipe trained it: the file has no class names and no "
            "normalization"
        )
    elif os.path.lexists(beside):
        raise ConfigError(
            f"out={out}: {beside} exists, where its description belongs; give another name, or remove it"
        )
    # What torch's own writer says of the tensors; transformers asks for it.
    metadata = {} if spec is None else {"format": "pt", METADATA_KEY: spec.to_text()}
    content = list(encode(weights, metadata=metadata))
    digest = hashlib.sha256()
    for part in content:
        digest.update(part)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(out, content, replace=False)
        if spec is not None:
            durable.write_file(beside, [f"{spec.to_text()}\n".encode()], replace=False)
    except OSError as error:
        raise ResourceError(f"out={out}: cannot be written: {error}") from error
    facts = {"bytes": out.stat().st_size, "sha256": digest.hexdigest()}
    return facts if spec is None else {**facts, "description": str(beside)}


def write_directory(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """Write a directory with the weights of the snapshot; all of it, or nothing."""
    trained = HuggingFaceRun.of(snapshot, "hf")
    if base_of_snapshot(snapshot) is not None:
        raise ConfigError(
            f"format=hf: {trained.run} has trained an adapter (model.lora); give format=peft for the adapter alone, or "
            "merge=true for one model, whose weights are rounded to the dtype of the base"
        )
    tensors = read_tensors(snapshot)
    model, _ = trained.without_values(tensors)
    fitted_weights(model, {"": tensors}, weights_file(snapshot), "snapshot")
    names: dict[Tensor, str] = {}
    # Tied names share memory, as transformers expects.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensors[name] = tensors[names.setdefault(parameter, name)]
    return _save(trained, model, out, state_dict=tensors)


def write_merged(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """merge=true: write the base with the adapter of the snapshot added by peft, in the dtype of the base."""
    trained = HuggingFaceRun.of(snapshot, "hf")
    if base_of_snapshot(snapshot) is None:
        raise ConfigError(
            f"merge=true: {trained.run} has no adapter of a base model in files (model.lora.rank); give format=hf"
        )
    outline, _ = trained.without_values(read_tensors(snapshot))
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "adapter"
        write_adapter(snapshot, adapter)
        base = type(outline).from_pretrained(
            trained.path,
            config=outline.config,
            dtype=outline.dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        model = import_package("peft").PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    return _save(trained, model, out)


def _save(trained: HuggingFaceRun, model: Any, out: Path, **tensors: Any) -> dict[str, Any]:
    with whole_directory(out) as folder:
        model.save_pretrained(folder, max_shard_size=MAX_SHARD, **tensors)
        for file in _companions(trained.path, trained.tokenizer):
            (folder / file.name).write_bytes(read_regular(file, MAX_JSON_BYTES))
    files = list(out.iterdir())
    return {"bytes": sum(file.stat().st_size for file in files), "files": len(files)}


def write_adapter(snapshot: VerifiedSnapshot, out: Path) -> dict[str, Any]:
    """format=peft: write the adapter of the snapshot and its configuration; both, or nothing."""
    trained = HuggingFaceRun.of(snapshot, "peft")
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


@final
@dataclass(frozen=True)
class HuggingFaceRun:
    """The model=hf of a run."""

    run: Path
    node: Mapping[str, Any]
    """The keys of the model."""
    tokenizer: Any
    """data.tokenizer."""

    @staticmethod
    def of(snapshot: VerifiedSnapshot, format: str) -> HuggingFaceRun:
        """Raises ConfigError, which names the format, for a run of any other model."""
        run = run_directory_of(snapshot.path)
        tree = saved_config(run)
        node: Mapping[str, Any] = tree.get("model") or {}
        if node.get("_target_") != TARGET:
            raise ConfigError(
                f"format={format}: {run} has trained {node.get('_target_')}, and only model=hf has a directory to begin"
                " with; remove format for a file of weights"
            )
        return HuggingFaceRun(run, node, (tree.get("data") or {}).get("tokenizer"))

    @property
    def path(self) -> Path:
        return Path(self.node["path"])

    def without_values(self, tensors: Mapping[str, Tensor]) -> tuple[Any, str]:
        """The model on the meta device, without adapters and with as many classes as in `tensors`; and its task."""
        config, spec = load_config(self.path), spec_of_run(self.run)
        has_labels = spec is not None and spec.text is not None
        given = self.node.get("task") or (TEXT_CLASSES if has_labels else None)
        task, chosen = model_class(config, given, str(self.path))
        dtype = pretrained.DTYPES[self.node.get("dtype") or "float32"]
        with torch.device("meta"):
            model = chosen._from_config(config, dtype=dtype)
            if task in CLASSIFICATION and (classes := _classes(model, tensors)) is not None:
                config.num_labels = classes
                model = chosen._from_config(config, dtype=dtype)
        if task in CLASSIFICATION and spec is not None:
            set_classes(model.config, model.config.num_labels, spec.class_names)
            set_padding(model.config, str(self.path), spec.tokenizer)
        return model, task


def read_tensors(snapshot: VerifiedSnapshot) -> dict[str, Tensor]:
    """Tensor by tensor, because transformers takes tensors that share memory for tied ones."""
    state = open_large_snapshot(snapshot).state
    return {name: state.value(outline) for name, outline in state.model.items()}


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` at the end of the block; after a failure nothing is left of it."""
    temporary = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield temporary
        temporary.chmod(0o755)  # mkdtemp gives it to nobody else
        os.rename(temporary, out)  # noqa: PTH104 - unlike Path.replace, fails on a directory that is not empty
    except OSError as error:
        raise ResourceError(f"out={out}: cannot be written: {error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _classes(model: Any, tensors: Mapping[str, Tensor]) -> int | None:
    """How many classes the snapshot has, if not those of config.json: the rows of the first tensor that differs."""
    expected = model.state_dict().items()
    differing = (
        tensors[name].shape
        for name, tensor in expected
        if name in tensors and tensors[name].shape != tensor.shape
    )
    return next((shape[0] for shape in differing if shape), None)


def _companions(directory: Path, tokenizer: Any) -> list[Path]:
    """The files to copy: those of the model, and the tokenizer of the data if it is another one."""
    folders = [directory]
    if isinstance(tokenizer, str):
        folders.append(Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent)
    files = (path for folder in folders for pattern in COPIED.split() for path in folder.glob(pattern))
    return sorted({path.name: path for path in files if path.is_file()}.values())


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
