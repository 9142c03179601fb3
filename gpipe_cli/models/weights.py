"""Load the weights of a file into a model: find its names among those of the file, check that all fit, and copy.

A file must match the model in names, shapes and kinds of numbers. Only the head, which scores classes, may be new.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import ConfigError
from gpipe_cli.sequential import LayerSequence
from gpipe_cli.sequential.deferred import meta_clone
from gpipe_cli.tensor_files.weights_file import StateDicts

_MAX_NAMES = 5  # in a message; a wrong file differs in hundreds of names
_DEEPEST_WRAPPER = 5
"""Components that wrappers may put before a name, as in `module.partitions.0.` of torchgpipe."""
_COMPILED = "_orig_mod."
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.(?=[12]\.)")
"""In torchvision's files of DenseNets; its modules lack the second dot now."""
_COUNT = "num_batches_tracked"
"""Files from before torch 0.4.1 lack it; only a batch norm without momentum uses it."""
_AVERAGED = ("ema", "swa")


@final
@dataclass(frozen=True)
class LoadedWeights:
    """What became of the tensors of a file."""

    file: str
    loaded: int
    expected: int
    """How many tensors the model has."""
    new: Sequence[str]
    """Tensors of the model that keep their initial values."""
    left_out: Sequence[str]
    """Tensors of the file that the model has no use for."""

    def __str__(self) -> str:
        counts = [name for name in self.new if name.endswith(_COUNT)]
        new = [
            *(name for name in self.new if name not in counts),
            *([f"{len(counts)} {_COUNT}"] if counts else []),
        ]
        lists = {"new": new, "left out": self.left_out}
        return f"{self.loaded} of {self.expected} tensors from {self.file}" + "".join(
            f"; {what}: {listed(names)}" for what, names in lists.items() if names
        )


def load_weights(
    model: nn.Module,
    file: StateDicts,
    path: str | Path,
    key: str = "model.weights",
    *,
    head: Callable[[], Collection[str]] = tuple,
    new_head: bool = False,
) -> LoadedWeights:
    """Load all of the model's tensors; `path` and `key` are for the error if they do not match.

    head: returns the names of the tensors that score classes; called only where it matters.
    new_head: let these keep their values, whatever the file has for them.
    """
    place, tensors = best_state_dict(model, file)
    fit = _Fit.of(model, tensors, head() if new_head else ())
    if new_head:
        fit = fit.without_head()
    if problems := fit.problems():
        own_head = head()
        if not new_head and own_head and not _Fit.of(model, tensors, own_head).without_head().problems():
            raise head_refusal(f"{key}={path}", fit.misshapen, fit.missing)
        raise _refusal(f"{key}={path}", problems)
    with warnings.catch_warnings():
        # A parameter without storage has nothing to copy to: it is only compared.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter", UserWarning)
        model.load_state_dict(fit.usable, strict=False)
    title = f"{path} ({place})" if place else str(path)
    expected = model.state_dict()
    new = [name for name in expected if name in fit.new]
    return LoadedWeights(title, len(expected) - len(new), len(expected), new, fit.left_out)


def fitted_weights(
    model: nn.Module, file: StateDicts, path: str | Path, key: str = "model.weights"
) -> dict[str, Tensor]:
    """Every tensor of the model as the file has it, by the model's names; the floating-point precision may differ."""
    fit = _Fit.of(model, best_state_dict(model, file)[1], ())
    if problems := fit.problems():
        raise _refusal(f"{key}={path}", problems)
    return {name: fit.usable.get(name, tensor) for name, tensor in model.state_dict().items()}


def best_state_dict(model: nn.Module, file: StateDicts) -> tuple[str, dict[str, Tensor]]:
    """The state dict of a file that has most of the model's names, and where it is; averaged weights come first."""
    expected = model.state_dict()

    def rank(item: tuple[str, dict[str, Tensor]]) -> tuple[int, bool]:
        place, tensors = item
        return sum(name in expected for name in tensors), any(word in place for word in _AVERAGED)

    return max(((place, _renamed(model, tensors, expected)) for place, tensors in file.items()), key=rank)


def _renamed(
    model: nn.Module, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors under the spelling of their names that most tensors of the model have; the first of equals."""
    spellings = [
        dict(zip(names, tensors.values(), strict=True)) for names in _spellings(model, list(tensors))
    ]
    complete = [spelling for spelling in spellings if len(spelling) == len(tensors)]
    return max(complete, key=lambda spelling: sum(name in expected for name in spelling))


def _spellings(model: nn.Module, names: list[str]) -> Iterator[list[str]]:
    """The names as they are, and without the leading components of wrappers, such as `model.` of a LightningModule."""
    yield names
    names = [_OLD_NAME.sub(r"\1", name.replace(_COMPILED, "")) for name in names]
    for _ in range(_DEEPEST_WRAPPER):
        yield names
        if isinstance(model, LayerSequence):
            yield [_original(model, name) for name in names]
        names = [name.partition(".")[2] or name for name in names]


def _original(model: LayerSequence, name: str) -> str:
    """What a layer key, such as "3.conv1.weight", is called in the original model."""
    index = name.partition(".")[0]
    known = index.isdecimal() and int(index) < len(model)
    return model.original_key(name) if known else name


@final
@dataclass(frozen=True)
class _Fit:
    """How the tensors of a file and those of a model differ."""

    expected: Mapping[str, Tensor]
    usable: dict[str, Tensor]
    head: Collection[str]
    missing: list[str]
    unexpected: list[str]
    new: frozenset[str] = frozenset()
    left_out: Sequence[str] = ()

    @staticmethod
    def of(model: nn.Module, tensors: Mapping[str, Tensor], head: Collection[str]) -> _Fit:
        expected = model.state_dict(keep_vars=True)
        usable = {**tensors, **_tied(expected, tensors)}
        missing = [name for name in expected if name not in usable]
        unexpected = [name for name in usable if name not in expected]
        if missing and unexpected:
            usable = _converted(model, usable, missing, unexpected)
            missing = [name for name in missing if name not in usable]
            unexpected = [name for name in unexpected if name in usable]
        counts = {name for name in missing if name.endswith(_COUNT)}
        missing = [name for name in missing if name not in counts]
        # A single number is no layer: wrappers that average weights count their updates in one.
        extra = [name for name in unexpected if not usable[name].dim()]
        unexpected = [name for name in unexpected if usable[name].dim()]
        usable = {name: tensor for name, tensor in usable.items() if name not in extra}
        return _Fit(expected, usable, head, missing, unexpected, frozenset(counts), extra)

    @property
    def misshapen(self) -> dict[str, str]:
        return {
            name: f"{name} {shape_text(self.usable[name].shape)} instead of {shape_text(tensor.shape)}"
            for name, tensor in self.expected.items()
            if name in self.usable and self.usable[name].shape != tensor.shape
        }

    def problems(self) -> dict[str, list[str]]:
        misshapen = list(self.misshapen.values())
        mistyped = [
            f"{name} {_dtype(self.usable[name])} instead of {_dtype(tensor)}"
            for name, tensor in self.expected.items()
            if name in self.usable and not _convertible(self.usable[name].dtype, tensor.dtype)
        ]
        problems = {"with another shape": misshapen, "with another dtype": mistyped}
        if not misshapen and not mistyped:
            problems = {"missing": self.missing, "unexpected": self.unexpected}
        return {problem: names for problem, names in problems.items() if names}

    def without_head(self) -> _Fit:
        """Leave the head as it is: its tensors, and modules that hold one of them and have nothing in the file."""
        head = set(self.head)
        roots = {
            root
            for name in head
            for root in _prefixes(name)
            if all(
                other in head or other not in self.usable for other in self.expected if _is_below(other, root)
            )
        }
        new = {name for name in self.expected if name in head or any(_is_below(name, root) for root in roots)}
        classes = {self.usable[name].shape[:1] for name in head if name in self.usable}
        known = {name.partition(".")[0] for name in self.expected}
        # A head of the file that the model has not got, such as an auxiliary one.
        others = {
            top
            for name in self.unexpected
            if (top := name.partition(".")[0]) not in known and self.usable[name].shape[:1] in classes
        }
        left_out = [
            name
            for name in self.unexpected
            if name.partition(".")[0] in others or any(_is_below(name, root) for root in roots)
        ]
        dropped = {*new, *left_out}
        return _Fit(
            self.expected,
            {name: tensor for name, tensor in self.usable.items() if name not in dropped},
            self.head,
            [name for name in self.missing if name not in new],
            [name for name in self.unexpected if name not in left_out],
            self.new | new,
            [*self.left_out, *left_out],
        )


def _tied(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the file has under another name of the same parameter."""
    given = {tensor: tensors[name] for name, tensor in expected.items() if name in tensors}
    return {
        name: given[tensor] for name, tensor in expected.items() if name not in tensors and tensor in given
    }


def _converted(
    model: nn.Module, tensors: Mapping[str, Tensor], missing: Sequence[str], unexpected: Sequence[str]
) -> dict[str, Tensor]:
    """The tensors after the modules have renamed those of their older versions, as they do when they load them."""
    clone = meta_clone(model)
    try:
        # Assigned rather than copied: a clone without storage has nothing to copy to.
        result = clone.load_state_dict(
            {name: tensors[name] for name in unexpected}, strict=False, assign=True
        )
    except RuntimeError:  # a renamed tensor does not fit
        return dict(tensors)
    assigned, absent = clone.state_dict(), {*result.missing_keys}
    renamed = {name: assigned[name] for name in missing if name not in absent}
    unknown = {*result.unexpected_keys}
    kept = {name: tensor for name, tensor in tensors.items() if name not in unexpected or name in unknown}
    return {**kept, **renamed}


def _refusal(name: str, problems: Mapping[str, Sequence[str]]) -> ConfigError:
    summary = "; ".join(f"{len(names)} {problem}: {listed(names)}" for problem, names in problems.items())
    return ConfigError(f"{name}: made for another model ({summary})")


def head_refusal(name: str, misshapen: Mapping[str, str], missing: Sequence[str] = ()) -> ConfigError:
    """The error about weights that fit a model except for its head, of which a tensor is misshapen or missing."""
    if misshapen:
        return ConfigError(
            f"{name}: its head has another size ({listed(list(misshapen.values()))}); give model.new_head=true to "
            "replace it by one for the classes of the data, or the model.num_classes that it was trained with"
        )
    return ConfigError(
        f"{name}: has another head or none ({listed(missing) or 'it has more'}); give model.new_head=true for a new one"
    )


def _prefixes(name: str) -> Iterator[str]:
    """The paths of the modules that a tensor is in."""
    while name := name.rpartition(".")[0]:
        yield name


def _is_below(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _convertible(given: torch.dtype, expected: torch.dtype) -> bool:
    return given == expected or (given.is_floating_point and expected.is_floating_point)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
