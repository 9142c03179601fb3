"""Build the configured model as a sequence of layers: as it is, from a list of layers, or by tracing it.

model.weights=FILE names the weights that it starts from, and model.new_head=true makes it one for other classes.
model.layers=[conv1, bn1, layer1, avgpool, {call: torch.flatten, start_dim: 1}, fc]
model.allow_unused=true
model.leaves=[encoder.attention]
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.activity import activity
from gpipe_cli.build.layer_check import check_fit, check_input, check_outputs
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.config.instantiate import accepted_arguments, instantiate, kept_keys
from gpipe_cli.config.schema import ModelConfig
from gpipe_cli.data.datasets import Data
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.losses.blocks import AUTO, NONE, BlockedLinear, automatic_block
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.losses.own import OwnLoss
from gpipe_cli.models.weights import LoadedWeights, load_weights
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.pytree import ModelInput
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.snapshots.record import BaseWeights, base_weights
from gpipe_cli.sequential import LayerSequence, flatten_model, listed_layers
from gpipe_cli.sequential.deferred import (
    DeferredParameter,
    defer_parameters,
    load_parameters,
    meta_clone,
    move_to_meta,
)
from gpipe_cli.sequential.selection import FrozenParameters, freeze, tracks_statistics
from gpipe_cli.tensor_files.weights_file import read_weights
from gpipe_cli.torch_internals.deferred_values import (
    DeferredValues,
    NotDeferrable,
    tensors_in_attributes,
    without_values,
)
from gpipe_cli.values import AUXILIARY_LOSS, POSITIONS

FEWER_PARAMETERS = "choose a smaller model, or keep it on disk with engine=offload engine.to=disk"
UNUSED = "allow_unused"
"""The key of `model` that lets `layers` leave out parameters."""
FILE, NEW_HEAD = "weights", "new_head"
WEIGHTS_KEYS = (FILE, NEW_HEAD)
"""Keys of `model` that name the weights it starts from, unless it reads them in its own way."""
OWN_KEYS = {"layers": list, "leaves": list, UNUSED: bool, FILE: str | None, NEW_HEAD: bool}
"""Keys of `model` that gpipe uses itself, unless the model's own target takes them, and their types."""

# A list of layers is data from a config, so it may call only these functions of one tensor.
FUNCTION_NAMES = """
    amax cos exp flatten mean movedim permute relu reshape sigmoid softmax squeeze sum swapaxes tanh transpose
    unflatten unsqueeze
"""
FUNCTIONS = {f"torch.{name}": getattr(torch, name) for name in FUNCTION_NAMES.split()}


@final
@dataclass(frozen=True)
class ConfiguredModel:
    """A model as the settings ask for it, and what was done to it."""

    sequence: nn.Sequential
    base: BaseWeights | None = None
    """The frozen parameters that stay in the files of a base model."""
    loaded: LoadedWeights | None = None
    """What was loaded from `model.weights`."""
    frozen: FrozenParameters | None = None
    """What `freeze` froze."""

    @property
    def facts(self) -> dict[str, Any]:
        """For launch.json."""
        loaded = None if self.loaded is None else str(self.loaded)
        return {"loaded": loaded, "frozen": None if self.frozen is None else asdict(self.frozen)}

    @property
    def notes(self) -> dict[str, str]:
        """What a user should know of it before the first step, each as `key text` in a line."""
        facts = {"loaded": self.loaded, "frozen": self.frozen}
        return {key: str(fact) for key, fact in facts.items() if fact is not None}

    @property
    def lines(self) -> list[str]:
        return [f"{key} {text}" for key, text in self.notes.items()]

    def print_notes(self) -> None:
        for line in self.lines:
            print_status(line)


@report_out_of_memory("building the model", FEWER_PARAMETERS)
def make_model(
    settings: ModelConfig,
    loader: BatchLoader,
    *,
    load: bool = True,
    initial_weights: bool = True,
    values: DeferredValues | None = None,
) -> ConfiguredModel:
    """Build the model and initialize it from the seed; `num_classes` defaults to the classes of the data.

    load: also read parameters that a model leaves in its files until a device needs them.
    initial_weights: load the file in `model.weights`. If a snapshot has all weights, the file may be gone.
    values: records how to compute the large tensors, which then have no memory.
    """
    activity.now("building the model")
    recording = nullcontext if values is None else values.recording
    torch.manual_seed(settings.seed if settings.trains else 0)
    node = model_arguments(settings)
    data = loader.data
    offered: dict[str, Any] = {
        "input_shape": data.shape,
        "tokenizer": data.tokenizer,
        "class_names": data.class_names,
        "say": print_status,
    }
    classes = node.get("num_classes", loader.classes)

    def build(num_classes: int) -> Any:
        if "num_classes" in node:
            return instantiate({**node, "num_classes": num_classes}, "model", settings.allow, **offered)
        return instantiate(node, "model", settings.allow, **offered, num_classes=num_classes)

    with recording():
        model = build(classes)
        if isinstance(model, list | tuple):
            model = listed_layers(model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model._target_={node['_target_']}: returns a {type(model).__name__}; it must return an nn.Module, or a "
            "list of layers"
        )
    _check_positions(model, loader.traced_batch())
    patterns = settings.freeze
    keys = own_keys(settings)
    sequence = as_sequence(model, _with_whole_norms(model, keys) if patterns else keys, loader.traced_batch())
    # Before freezing: snapshots leave out only what the model itself keeps in files and never trains.
    base = base_weights(settings, sequence)
    takes_classes = "num_classes" in {*node, *accepted_arguments(node, "model", settings.allow)}
    loaded = None
    if initial_weights:
        with recording():
            loaded = load_initial_weights(sequence, keys, build if takes_classes else None, classes)
    frozen = freeze(sequence, patterns)
    if settings.uses_loss:
        rows = max(loader.least_rows, -(-loader.batch_size // (settings.chunks * loader.replicas)))
        loss = _loss(settings, model, data)
        use_blocks(sequence, loss, rows * loader.traced_samples()[1][0].numel())
    if load:
        load_parameters([sequence], torch.device("cpu"))
    return ConfiguredModel(sequence, base, loaded, frozen)


def _check_positions(model: nn.Module, sample: ModelInput) -> None:
    """Refuse a model that cannot know where packed documents begin; a sequence says itself what it does not take."""
    if not isinstance(sample, dict) or POSITIONS not in sample:
        return
    chunk = getattr(getattr(model, "config", None), "attention_chunk_size", None)
    if isinstance(chunk, int) and chunk < sample[POSITIONS].shape[1]:
        raise ConfigError(
            f"data.pack=true: {type(model).__name__} attends within chunks of {chunk} tokens, counted from the first "
            f"token of a sample, not of a document; give data.pack=false, or data.context={chunk} or less"
        )
    takes = inspect.signature(model.forward).parameters
    if POSITIONS not in takes and not isinstance(model, nn.Sequential):
        raise ConfigError(
            f"data.pack=true: {type(model).__name__} takes no {POSITIONS}, so it cannot keep packed documents apart; "
            "give data.pack=false, or data.pack=joined to let them see each other"
        )


def _loss(settings: ModelConfig, model: nn.Module, data: Data) -> Any:
    """The configured loss, unless it would shift targets twice, as models of transformers for the next token do."""
    loss = instantiate(settings.loss, "loss", settings.allow)
    has_next_tokens = data.tokenizer is not None and data.class_names is None
    if isinstance(loss, OwnLoss) and has_next_tokens and hasattr(model, "prepare_inputs_for_generation"):
        raise ConfigError(
            f"loss=own: the targets of this data are the next tokens, and {type(model).__name__} shifts its targets "
            "itself, so it would learn the tokens after those; choose loss=token_cross_entropy"
        )
    return loss


def use_blocks(model: nn.Sequential, loss: object, tokens: int) -> None:
    """Let the last linear layer of a model leave its scores to the loss, if `loss.block` says so.

    tokens: in a micro-batch. They and the model decide, not the partitions, on which no result may depend.
    """
    block = getattr(loss, "block", NONE) if isinstance(loss, TokenCrossEntropy) else NONE
    if block == NONE:
        return
    last = _last_linear(model[-1])
    if last is None and block != AUTO:
        raise ConfigError(
            f"loss.block={block}: is for a model that returns the output of an nn.Linear as it is, and this one does "
            "not; remove it"
        )
    size = block if last is None or block != AUTO else automatic_block(last, tokens)
    if last is not None and size is not None:
        last.__class__ = BlockedLinear
        assert isinstance(last, BlockedLinear)
        last.block = int(size)


def _last_linear(layer: nn.Module) -> nn.Linear | None:
    """The linear layer whose output the layer returns as it is."""
    linear = {
        name: part
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward
    }
    return next((part for name, part in linear.items() if _returns_output_of(layer, name, part)), None)


def _returns_output_of(layer: nn.Module, name: str, part: nn.Linear) -> bool:
    copy = meta_clone(layer)
    outputs: list[Any] = []
    copy.get_submodule(name).register_forward_hook(lambda module, input, output: outputs.append(output))
    hidden = torch.empty(1, 2, part.in_features, dtype=part.weight.dtype, device="meta")
    try:
        with torch.no_grad():
            returned = tensors_of(copy(hidden))
    except Exception:  # noqa: BLE001 - it takes another input, and computes its scores itself
        return False
    return len(outputs) == len(returned) == 1 and returned[0] is outputs[0]


def build_deferred(
    make: Callable[[DeferredValues | None], nn.Sequential],
) -> tuple[nn.Sequential, DeferredValues | None]:
    """Build a model whose large parameters are deferred, or a whole model if its constructor needs their memory.

    `values` computes its other large tensors.
    """
    values = DeferredValues()
    try:
        model = make(values)
        if values.in_use(tensors_in_attributes(model.modules())):
            gc.collect()  # what the constructor left behind may be in cycles
        if unknown := values.in_use(tensors_in_attributes(model.modules())):
            raise NotDeferrable(f"{unknown} large tensors are in use that are not attributes of its modules")
    except Exception as error:
        if not isinstance(error, RuntimeError | TypeError) and not isinstance(error.__cause__, NotDeferrable):
            raise
        if World.current().is_rank_zero:
            print_status(f"building the whole model in memory, because it cannot be divided: {error}")
        return make(None), None
    defer_parameters(model, values)
    return model, values


def build_on_meta(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    """Build a model on the meta device; allocate it first only if its constructor computes with values."""
    try:
        with without_values(), warnings.catch_warnings():
            # A file of weights is read to check that it fits, but a meta tensor cannot hold its values.
            warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
            model = make()
    except RuntimeError as error:  # includes its child NotImplementedError
        print_status(f"building the model with storage, because its constructor needs values: {error}")
        model = make()
    move_to_meta(model)
    return model


def model_arguments(settings: ModelConfig) -> dict[str, Any]:
    """The `model` node without the keys that gpipe uses itself and without a `num_classes` of null."""
    own = own_keys(settings)
    node: Mapping[str, Any] = settings.model
    return {
        key: value
        for key, value in node.items()
        if key not in own and (key != "num_classes" or value is not None)
    }


def own_keys(settings: ModelConfig) -> dict[str, Any]:
    """The keys of `model` that gpipe uses, where the model's target does not take them itself."""
    return kept_keys(settings.model, "model", settings.allow, OWN_KEYS)


def check_own_keys(keys: Mapping[str, Any]) -> None:
    """Check the keys of `model` that gpipe uses before the model is built."""
    if keys.get(NEW_HEAD) and keys.get(FILE) is None:
        raise ConfigError(
            f"model.{NEW_HEAD}=true: replaces the head of a file, and model.{FILE} is not given"
        )
    if UNUSED in keys and "layers" not in keys:
        raise ConfigError(f"model.{UNUSED}={keys[UNUSED]}: has no effect without a list in model.layers")
    for index, item in enumerate(keys.get("layers", ())):
        _layer(item, f"model.layers[{index}]")


def as_sequence(model: nn.Module, keys: Mapping[str, Any], sample: Value) -> nn.Sequential:
    """The model as a sequence; a model that is one stays as it is if no key asks for other layers."""
    if "layers" in keys:
        if (weight := getattr(model, AUXILIARY_LOSS, None)) is not None:
            raise ConfigError(
                f"model.layers={keys['layers']}: leaves out the auxiliary loss of the experts, model.router_loss="
                f"{weight}; remove model.layers, or give model.router_loss=0"
            )
        layers = [_layer(item, f"model.layers[{index}]") for index, item in enumerate(keys["layers"])]
        sequence = flatten_model(model, layers, allow_unused=keys.get(UNUSED, False))
        check_fit(sequence, sample, "model.layers must name everything that its forward does, in order")
        return sequence
    if isinstance(model, nn.Sequential) and "leaves" not in keys:
        check_input(model, sample)
        if not isinstance(model, LayerSequence):  # a LayerSequence was checked when it was made
            check_outputs(model, sample)
        return model
    from gpipe_cli.sequential import to_sequential  # here, since most models are sequences already

    return to_sequential(model, sample, keys.get("leaves", ()))


def _with_whole_norms(model: nn.Module, keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep norms whole that tracing would take apart: their code would be that of train mode, even if frozen."""
    if "layers" in keys or (isinstance(model, nn.Sequential) and "leaves" not in keys):
        return keys  # it is not traced
    norms = {
        path
        for path, module in model.named_modules()
        if tracks_statistics(module) and next(module.children(), None) is not None
    }
    return {**keys, "leaves": [*keys.get("leaves", ()), *sorted(norms)]} if norms else keys


def _layer(item: Any, key: str) -> Any:
    if isinstance(item, str):
        return item
    if not isinstance(item, Mapping) or "call" not in item:
        raise ConfigError(
            f"{key}={item}: give the name of a submodule, or {{call: torch.flatten, start_dim: 1}}"
        )
    name = item["call"]
    if not isinstance(name, str) or name not in FUNCTIONS:
        raise ConfigError(f"{key}.call={name}: not allowed here; {or_list(str(name), FUNCTIONS)}")
    arguments = {argument: value for argument, value in item.items() if argument != "call"}
    return partial(FUNCTIONS[name], **arguments)


def load_initial_weights(
    model: nn.Sequential, keys: Mapping[str, Any], build: Callable[[int], nn.Module] | None, classes: int
) -> LoadedWeights | None:
    """Load the file that the keys name, if any.

    build: makes the same model for another number of classes; None if it cannot.
    """
    path = keys.get(FILE)
    if path is None:
        return None
    if any(isinstance(parameter, DeferredParameter) for parameter in model.parameters()):
        raise ConfigError(
            f"model.{FILE}={path}: this model reads its weights from the files in model.path; remove model.{FILE}, "
            "or start from it alone with model.init=random"
        )
    head = partial(head_tensors, model, build, classes)
    return load_weights(model, read_weights(path), path, head=head, new_head=keys.get(NEW_HEAD, False))


def head_tensors(model: nn.Module, build: Callable[[int], nn.Module] | None, classes: int) -> Collection[str]:
    """The names of the tensors that score classes: those that differ in a model for one class more.

    Where no other model can be built, those of the last module with an output for each class.
    """
    expected = model.state_dict()
    other = {} if build is None else _outline(build, classes + 1)
    head = {name for name, tensor in expected.items() if name in other and other[name].shape != tensor.shape}
    if head:
        return head
    scoring = [name for name, tensor in expected.items() if tensor.shape[:1] == (classes,)]
    last = scoring[-1].rpartition(".")[0] if scoring else None
    return {name for name in expected if name.rpartition(".")[0] == last}


def _outline(build: Callable[[int], nn.Module], classes: int) -> Mapping[str, torch.Tensor]:
    """The tensors of a model for so many classes, without their values."""
    try:
        # Small tensors are drawn even there, which must not change what else is drawn from the seed.
        with torch.random.fork_rng(devices=[]), without_values():
            return build(classes).state_dict()
    except (ConfigError, RuntimeError, ValueError, TypeError):  # the model accepts no other number of classes
        return {}
