"""Which class of transformers a directory stands for: that of its configuration for a task."""

from __future__ import annotations

from typing import Any

from gpipe_cli.errors import ConfigError
from gpipe_cli.huggingface import transformers

TASKS = {
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
"""What transformers calls the classes for each task. A configuration that names no class means the first that it has:
BERT also has a causal and T5 also has a classifying variant."""
CLASSIFICATION = frozenset({"image_classification", "sequence_classification"})


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
