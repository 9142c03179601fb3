"""model=hf: any model of transformers for language, text classification or images, from a local directory.

The architecture is that of config.json. The modules are transformers' own, so outputs are bitwise those of
`from_pretrained`, and names are those of its state_dict. gpipe downloads nothing and runs no code of the directory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError, or_list
from gpipe_cli.huggingface import CONFIG, has_tokenizer, load_config, read_json, transformers
from gpipe_cli.models.hf.deferred_loading import Loading, is_in_head, stored_tensors
from gpipe_cli.models.hf.lora import LoraSettings, add_adapters
from gpipe_cli.models.hf.nf4 import NF4, quantize_frozen
from gpipe_cli.models.weights import shape_text
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.values import AUXILIARY_LOSS, FilePath, check_whole_number

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("sdpa", "eager")
OTHER_ATTENTIONS = {
    "flex_attention": "hands a BlockMask from module to module, and a pipe carries tensors only",
    "flash_attention_2": "runs on accelerators only, and gpipe traces models without; sdpa has torch's flash kernels",
}
INITS = ("weights", "random")
ROUTER_OUTPUTS = "output_router_logits"
"""The key of config.json with which transformers adds the auxiliary loss of the experts."""
TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
"""What transformers calls the classes for each task. A configuration that names no class means the first that it has:
BERT also has a causal and T5 also has a classifying variant."""
TEXT_CLASSES = "sequence_classification"
CLASSIFICATION = frozenset({"image_classification", TEXT_CLASSES})


def build(
    path: FilePath,
    task: str | None = None,
    init: str = "weights",
    dtype: str | None = None,
    num_classes: int = 2,
    new_head: bool = False,
    lora: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    router_loss: float | None = None,
    attention: str | None = None,
    input_shape: tuple[int, ...] = (32,),
    tokenizer: Any = None,
    class_names: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """Return the model in the directory `path`; its parameters stay in the files until a device needs them.

    init: `weights` for those of the directory; `random` to draw all parameters from torch's default generator.
    lora: the keys of `LoraSettings`, to train adapters, the head of a classifier and what the files lack, and no more.
    quantize: `nf4` for a base of four bits per weight, beside which adapters are trained.
    router_loss: the weight of the auxiliary loss of a mixture of experts; None: as the directory has it.
    attention: `sdpa` or `eager`; None: as transformers chooses.
    num_classes: of a classifier; for language models the number of tokens in the data, which the model must know.
    tokenizer, class_names: of the data, if it is text, and if it has a class for each sample.
    say: prints what the user should know about the files.
    """
    adapters = LoraSettings.of(lora)
    _check_choices(init, dtype, quantize, adapters)
    directory = Path(path)
    config = load_config(directory)
    _check_unquantized(config, path)
    task, chosen = model_class(config, task or task_of_labels(tokenizer, class_names), path)
    _check_new_head(new_head, task, init)
    _choose_attention(config, chosen, attention)
    _turn_off_caches_and_checkpoints(config, path, say)
    check_input_shape(task, path, input_shape)
    if task in CLASSIFICATION:
        set_classes(config, num_classes, class_names, None if init == "random" or new_head else path)
        set_padding(config, path, tokenizer)
    if task != "image_classification":
        classes = 0 if task in CLASSIFICATION else num_classes
        check_vocabulary(config, path, classes if tokenizer is None else tokenizer.vocabulary)
        check_targets(task, tokenizer, class_names, say)
        if init == "weights" and (warning := ignored_tokenizer(directory, tokenizer)):
            say(warning)
    kind = DTYPES[dtype or ("float32" if quantize is None else "bfloat16")]
    if init == "random":
        model: nn.Module = chosen._from_config(config, dtype=kind)
    else:
        loading = Loading(chosen, config, kind, stored_tensors(directory), path, say)
        model = loading.load(classifies=task in CLASSIFICATION, new_head=new_head)
    if task != "image_classification":
        check_context(config, model, path, input_shape[0])
    if adapters is not None:
        add_adapters(model, adapters, _trained_whole(model, task, init), say)
    if quantize is not None:
        quantize_frozen(model, say)
    _add_router_loss(model, task, router_loss, path, say)
    return model


def _check_choices(init: str, dtype: str | None, quantize: str | None, adapters: LoraSettings | None) -> None:
    if init not in INITS:
        raise ConfigError(f"model.init={init}: must be one of: {', '.join(INITS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype={dtype}: must be one of: {', '.join(DTYPES)}, or null for the default"
        )
    if quantize not in (None, NF4):
        raise ConfigError(
            f"model.quantize={quantize}: must be {NF4}, or null to keep the weights as they are"
        )
    if quantize is not None and adapters is None:
        raise ConfigError(
            f"model.quantize={quantize}: weights of four bits cannot be trained; give model.lora.rank, such as 8, to "
            "train adapters beside them"
        )


def _check_new_head(new_head: bool, task: str, init: str) -> None:
    if new_head and (task not in CLASSIFICATION or init == "random"):
        raise ConfigError(
            f"model.new_head=true: is for weights of a classifier, and this is task={task} init={init}"
        )


def _check_unquantized(config: Any, path: str) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.path={path}: its weights are quantized, so they cannot be trained; give those before quantization, "
            f"with model.quantize={NF4} to train adapters beside weights of four bits"
        )


def normalization(node: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """The mean and std per channel that an image model was trained with; `node` are the keys of the model."""
    try:
        settings = read_json(Path(node["path"]) / "preprocessor_config.json")
    except FileNotFoundError:
        return None
    match settings:
        case {"image_mean": [*mean], "image_std": [*std]} if settings.get("do_normalize", True):
            return tuple(map(float, mean)), tuple(map(float, std))
    return None


def _trained_whole(model: nn.Module, task: str, init: str) -> list[str]:
    """The parameters that are trained beside adapters: the head of a classifier, and what the files lack."""
    return [
        name
        for name, parameter in model.named_parameters()
        if (task in CLASSIFICATION and is_in_head(model, name))
        or (init == "weights" and not isinstance(parameter, DeferredParameter))
    ]


def _choose_attention(config: Any, chosen: type[Any], attention: str | None) -> None:
    if attention is None:
        return
    name = f"model.attention={attention}"
    if attention in OTHER_ATTENTIONS:
        raise ConfigError(f"{name}: {OTHER_ATTENTIONS[attention]}; give model.attention=sdpa")
    if attention not in ATTENTIONS:
        raise ConfigError(f"{name}: {or_list(attention, ATTENTIONS)}")
    if attention == "sdpa" and not chosen._supports_sdpa:
        raise ConfigError(f"{name}: a {chosen.__name__} computes its own; give model.attention=eager")
    config._attn_implementation = attention


def _turn_off_caches_and_checkpoints(config: Any, path: str, say: Callable[[str], None]) -> None:
    """Training has no use for the keys and values of earlier tokens, and a pipeline could not carry them."""
    for part in _parts(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    asking = [part for part in _parts(config) if getattr(part, "gradient_checkpointing", False)]
    for part in asking:
        part.gradient_checkpointing = False
    if asking:
        say(f"model.path={path}: checkpoint= replaces gradient_checkpointing of config.json")


def _add_router_loss(
    model: Any, task: str, weight: float | None, path: str, say: Callable[[str], None]
) -> None:
    """Let a model with experts return its auxiliary loss beside the scores, if it is to count.

    transformers adds it to the loss that it computes itself, which gpipe does not use.
    """
    if weight is not None and not (weight >= 0 and math.isfinite(weight)):
        raise ConfigError(f"model.router_loss={weight}: must be a finite number of at least 0")
    in_config = bool(getattr(model.config, ROUTER_OUTPUTS, False))
    weights = (getattr(model, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef"))
    own = next((each for each in weights if each is not None), None) if task == "causal_lm" else None
    if own is None and (weight or (in_config and weight is None)):
        reason = f"model.path={path}: {CONFIG} has {ROUTER_OUTPUTS}=true, but" if weight is None else ""
        raise ConfigError(
            f"{reason or f'model.router_loss={weight}:'} gpipe adds no auxiliary loss of experts for a "
            f"{type(model).__name__}; give model.router_loss=0 to train without it"
        )
    if weight is None and own and not in_config:
        say(
            f"model.router_loss=null: the auxiliary loss of the experts does not count, because {CONFIG} has "
            f"{ROUTER_OUTPUTS}=false; model.router_loss={own} counts it with the weight in {CONFIG}"
        )
    weight = (own if in_config else 0) if weight is None else weight
    for part in _parts(model.config):
        if hasattr(part, ROUTER_OUTPUTS):
            setattr(part, ROUTER_OUTPUTS, bool(weight))
    if weight:
        model.__class__ = _with_router_loss(type(model), float(weight))


def _with_router_loss(kind: type[Any], weight: float) -> type[Any]:
    """A model's class, whose forward returns the auxiliary loss times `weight` beside the scores."""

    @wraps(kind.forward)
    def forward(model: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        output = kind.forward(model, *args, **kwargs)
        loss = getattr(output, "aux_loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"model.router_loss={weight}: {kind.__name__} computes no auxiliary loss; give model.router_loss=0"
            )
        # A number per sample, because micro-batches are put together by their samples.
        return {"logits": output.logits, AUXILIARY_LOSS: (weight * loss).expand(len(output.logits))}

    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward, AUXILIARY_LOSS: weight}
    )


def _parts(config: Any) -> list[Any]:
    """A configuration and the ones in it, such as of the text and the image part of a model."""
    return [
        config,
        *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None),
    ]


def model_class(config: Any, task: str | None, path: str) -> tuple[str, type[Any]]:
    """The task, by default that of the class that the configuration names, and the class for it."""
    classes = {name: _classes(config, mapping) for name, mapping in TASKS.items()}
    possible = [name for name, of_task in classes.items() if of_task]
    if task is not None and task not in TASKS:
        raise ConfigError(f"model.task={task}: must be one of: {', '.join(TASKS)}")
    if not possible:
        raise ConfigError(
            f"model.path={path}: transformers has no {config.model_type} for any of: {', '.join(TASKS)}"
        )
    if task is not None and task not in possible:
        raise ConfigError(f"model.task={task}: a {config.model_type} is for {' or '.join(possible)}")
    saved = config.architectures or []
    chosen = [task] if task else [name for name in possible if _named(classes[name], saved)]
    if not chosen:
        if saved and not saved[0].endswith("Model"):
            raise ConfigError(
                f"model.path={path}: was saved as {saved[0]}; give model.task, one of: {', '.join(possible)}"
            )
        chosen = possible
    of_task = classes[chosen[0]]
    return chosen[0], next(iter(_named(of_task, saved)), of_task[0])


def _classes(config: Any, mapping: str) -> list[type[Any]]:
    known = getattr(transformers(), mapping)
    if type(config) not in known:
        return []
    classes = known[type(config)]
    return list(classes) if isinstance(classes, tuple | list) else [classes]


def _named(classes: list[type[Any]], names: list[str]) -> list[type[Any]]:
    return [each for each in classes if each.__name__ in names]


def check_input_shape(task: str, path: str, input_shape: tuple[int, ...]) -> None:
    takes_images = task == "image_classification"
    if len(input_shape) == (3 if takes_images else 1):
        return
    kind, hint = (
        ("images", "data=image_folder loss=cross_entropy")
        if takes_images
        else ("sequences of tokens", "data=text loss=token_cross_entropy")
    )
    raise ConfigError(
        f"model.path={path}: task={task} takes {kind}, and the data has {shape_text(input_shape)}; choose data and a "
        f"loss that fit, such as {hint}"
    )


def check_vocabulary(config: Any, path: str, tokens: int) -> None:
    """tokens: how many the data has."""
    known = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(known, int) and tokens > known:
        raise ConfigError(
            f"model.path={path}: knows {known} tokens (vocab_size), and the data has {tokens}; give the tokenizer that "
            f"the model was trained with, such as data.tokenizer={path}"
        )


def own_tokenizer(node: Mapping[str, Any]) -> str | None:
    """The directory of the tokenizer that the model was trained with; `node` are the keys of the model."""
    return node["path"] if has_tokenizer(Path(node["path"])) else None


def task_of_labels(tokenizer: Any, class_names: Sequence[str] | None) -> str | None:
    """The only task for texts with a class each; None for other data."""
    return None if tokenizer is None or class_names is None else TEXT_CLASSES


def set_classes(config: Any, classes: int, names: Sequence[str] | None, path: str | None = None) -> None:
    """path: where the head comes from, if it is kept, whose classes must be in the order of the data."""
    known = [config.id2label[number] for number in sorted(config.id2label or {})]
    if path is not None and names is not None and set(known) == set(names) and known != list(names):
        raise ConfigError(
            f"model.path={path}: its head has the classes of the data in another order; give "
            f"data.labels=[{','.join(known)}], or a new head with model.new_head=true"
        )
    check_whole_number("model.num_classes", classes, least=1)
    config.num_labels = classes  # names the classes too, by their numbers
    if names is not None and len(names) == classes:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}


def set_padding(config: Any, path: str, tokenizer: Any) -> None:
    """Tell the model which token the data pads with: a classifier made of a decoder finds the end of a text by it."""
    padding, known = getattr(tokenizer, "padding", None), getattr(config, "pad_token_id", None)
    if padding is not None and known is None:
        config.pad_token_id = padding
    elif padding is not None and known != padding:
        raise ConfigError(
            f"model.path={path}: pads with token {known} (pad_token_id), and the data with token {padding}; give the "
            "tokenizer of the model, or the same pad_token_id in config.json"
        )


def check_targets(
    task: str, tokenizer: Any, class_names: Sequence[str] | None, say: Callable[[str], None]
) -> None:
    """gpipe's own data sets of text, which alone have a tokenizer, ask for the next token of each, or for a label."""
    if tokenizer is not None and (task == TEXT_CLASSES) != (class_names is not None):
        raise ConfigError(
            f"model.task={task}: "
            + (
                "needs a class for each text; name its field, such as data=rows data.label=label"
                if class_names is None
                else "has no use for data.label; remove one of them"
            )
        )
    if tokenizer is not None and task == "seq2seq":
        raise ConfigError(
            "model.task=seq2seq: data=text and data=rows have no input for the decoder; give custom data whose "
            "inputs are {input_ids, attention_mask, decoder_input_ids}, with data._target_"
        )
    if tokenizer is not None and task == "masked_lm":
        say(
            "model.task=masked_lm: data=text and data=rows ask for the next token, which this model sees; give custom "
            "data that masks tokens, with data._target_"
        )


def ignored_tokenizer(directory: Path, tokenizer: Any) -> str | None:
    """A warning if the data is bytes, which mean nothing to a model that was trained with a tokenizer."""
    if getattr(tokenizer, "digest", None) != "bytes" or not (directory / "tokenizer.json").exists():
        return None
    return (
        "data.tokenizer=null: every byte is a token, and the model was trained with another tokenizer; give "
        f"data.tokenizer={directory}"
    )


def check_context(config: Any, model: nn.Module, path: str, context: int) -> None:
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    # Models like RoBERTa count positions from the padding token on, so the first rows of the table are not for tokens.
    offset = next(
        (
            part.padding_idx + 1
            for name, part in model.named_modules()
            if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None
        ),
        0,
    )
    if isinstance(longest, int) and context > longest - offset > 0:
        raise ConfigError(
            f"data.context={context}: the model has {longest - offset} positions (max_position_embeddings of {path}); "
            f"give data.context={longest - offset} or less"
        )
