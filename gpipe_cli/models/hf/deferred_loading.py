"""Build a model of transformers whose parameters are still in the files of its directory.

`from_pretrained` itself does it, with deferred tensors in place of those in the files: so names, conversions, ties,
new heads and buffers are exactly those that transformers gives the model. Between files and modules, transformers
renames, splits, stacks and transposes tensors. What it does with a `DeferredTensor` is recorded: such a tensor is on
the meta device and knows from which tensors of the files its value is to be computed, and how.

Reading a file's header proves that the file is whole, so damage is found before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.errors import RunError
from gpipe_cli.huggingface import read_json
from gpipe_cli.models.weights import head_refusal, listed, shape_text
from gpipe_cli.sequential.deferred import DeferredParameter
from gpipe_cli.tensor_files.tensor_file import BadTensors, TensorFile


class DeferredTensor(Tensor):  # not final: torch makes it an nn.Parameter by an attribute
    compute: Callable[[], Tensor]
    """Reads and computes the value."""
    sources: frozenset[str]
    """The names, in the files, of the tensors that the value depends on."""

    @staticmethod
    def of(
        shape: Sequence[int], dtype: torch.dtype, name: str, compute: Callable[[], Tensor]
    ) -> DeferredTensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(DeferredTensor)
        tensor.compute, tensor.sources = compute, frozenset({name})
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        # Before the call: a function that works in place returns one of its arguments.
        arguments = _later(args, named)
        sources = frozenset().union(*(tensor.sources for tensor in _deferred([*args, *named.values()])))
        result = super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]

        def value() -> Any:
            positional, by_name = arguments()
            return func(*positional, **by_name)

        several = isinstance(result, tuple | list)
        for index, output in enumerate(result if several else [result]):
            if isinstance(output, DeferredTensor):
                output.compute = _member(value, index) if several else value
                output.sources = sources
        return result


@final
class StoredTensor:
    """A tensor in a file, with the methods of safetensors' slices that transformers calls."""

    def __init__(self, name: str, outline: Tensor, read: Callable[[], Tensor], file: Path) -> None:
        self.name, self._outline, self._read, self.file = name, outline, read, file

    @property
    def shape(self) -> torch.Size:
        return self._outline.shape

    def __getitem__(self, index: Any) -> StoredTensor:
        assert index is Ellipsis, "transformers reads whole tensors"
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> DeferredTensor:
        """The tensor with this dtype, on no device yet."""
        read, kind = self._read, dtype or self._outline.dtype
        return DeferredTensor.of(self.shape, kind, self.name, lambda: read().to(kind))


def _member(value: Callable[[], Any], index: int) -> Callable[[], Tensor]:
    return lambda: value()[index]


def _later(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], tuple[list[Any], dict[str, Any]]]:
    """The arguments with the values of deferred tensors, which are computed when this is called."""
    positional, named = [_value(item) for item in args], {key: _value(item) for key, item in kwargs.items()}
    return lambda: ([item() for item in positional], {key: item() for key, item in named.items()})


def _value(item: Any) -> Callable[[], Any]:
    if isinstance(item, DeferredTensor):
        return item.compute
    if isinstance(item, tuple | list):
        kind, members = type(item), [_value(member) for member in item]
        return lambda: kind(member() for member in members)
    return lambda: item


def _deferred(items: Iterable[Any]) -> Iterator[DeferredTensor]:
    for item in items:
        if isinstance(item, DeferredTensor):
            yield item
        elif isinstance(item, tuple | list):
            yield from _deferred(item)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors in the directory by their names in the files; nothing but headers is read yet."""
    name = f"model.path={directory}"
    if (directory / SINGLE).exists():
        return _tensors_in(directory / SINGLE)
    if not (directory / INDEX).exists():
        pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
        if pickled:
            raise RunError(
                f"{name}: has pickled weights only ({pickled[0]}), which can run code and which gpipe does not load; "
                "load and save them with transformers (save_pretrained) in an environment you trust"
            )
        raise RunError(
            f"{name}: has no weights ({SINGLE} or {INDEX}); add them, or give model.init=random to train from scratch"
        )
    tensors: dict[str, StoredTensor] = {}
    for file, expected in _files(directory).items():
        path = directory / file
        if not path.exists():
            raise RunError(f"{name}: {INDEX} names {file}, which is missing")
        of_file = _tensors_in(path)
        if missing := [key for key in expected if key not in of_file]:
            raise RunError(f"{path}: has no tensor {missing[0]}, which {INDEX} says is in it")
        tensors.update(of_file)
    return tensors


def _files(directory: Path) -> dict[str, list[str]]:
    """The files that the index names, each with the tensors that should be in it."""
    path = directory / INDEX
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise RunError(f"{path}: damaged: it has no weight_map")
    files: dict[str, list[str]] = {}
    for key, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise RunError(f"{path}: puts {key} in {file!r}, not in a safetensors file in this directory")
        files.setdefault(file, []).append(key)
    return files


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    try:
        file = TensorFile(path)
    except (BadTensors, OSError) as error:
        raise RunError(f"{path}: damaged, or not a safetensors file: {error}") from error
    return {
        key: StoredTensor(key, outline, partial(_read, file, path, key), path)
        for key, outline in file.outlines.items()
    }


def _read(file: TensorFile, path: Path, key: str) -> Tensor:
    try:
        return file.read(key)
    except (BadTensors, OSError) as error:
        raise RunError(f"{path}: changed or damaged since training began: {error}") from error


@final
@dataclass(frozen=True)
class Loading:
    """Where a model comes from, for `load` and its messages."""

    model_class: type[Any]
    config: Any
    dtype: torch.dtype
    tensors: Mapping[str, StoredTensor]
    path: str
    say: Callable[[str], None]
    """Prints what the user should know about the files."""

    def load(self, *, classifies: bool, new_head: bool) -> Any:
        """The model; what the files lack is drawn from torch's default generator.

        classifies: whether parameters outside the base model form a head for some classes, which may be replaced.
        """
        model, info = self._from_pretrained(self.tensors)
        if new_head:
            head = (
                tensor.sources
                for name, tensor in model.named_parameters()
                if isinstance(tensor, DeferredTensor) and is_in_head(model, name)
            )
            mismatched = {name for name, *_ in info["mismatched_keys"] if is_in_head(model, name)}
            dropped = frozenset[str]().union(*head) | mismatched
            model, info = self._from_pretrained(
                {name: tensor for name, tensor in self.tensors.items() if name not in dropped}
            )
        self._check(model, info, classifies=classifies, new_head=new_head)
        _tie_equal(model)
        self._replace_deferred(model)
        model.train()
        return model

    def _from_pretrained(self, tensors: Mapping[str, StoredTensor]) -> tuple[Any, dict[str, Any]]:
        try:
            model, info = self.model_class.from_pretrained(
                None,
                config=self.config,
                state_dict=dict(tensors),
                dtype=self.dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"model.path={self.path}: the weights cannot become a {self.model_class.__name__}: {reason}"
            ) from error
        return model, info

    def _check(self, model: Any, info: Mapping[str, Any], *, classifies: bool, new_head: bool) -> None:
        name = f"model.path={self.path}"
        misshapen = {
            key: f"{key} {shape_text(given)} instead of {shape_text(expected)}"
            for key, given, expected in sorted(info["mismatched_keys"])
        }
        if misshapen and classifies and all(is_in_head(model, key) for key in misshapen):
            raise head_refusal(name, misshapen)
        missing = sorted(info["missing_keys"])
        lacking = [key for key in missing if not self._may_be_new(model, key, new_head)]
        problems = {"with another shape": list(misshapen.values()), "missing": lacking}
        summary = "; ".join(f"{len(keys)} {kind}: {listed(keys)}" for kind, keys in problems.items() if keys)
        if summary:
            raise RunError(f"{name}: the weights do not fit {self.model_class.__name__} ({summary})")
        if missing:
            self.say(f"{name}: has no values for {listed(missing)}; gpipe draws them from the seed")
        if unexpected := sorted(info["unexpected_keys"]):
            self.say(f"{name}: {self.model_class.__name__} does not use {listed(unexpected)}")

    def _may_be_new(self, model: Any, key: str, new_head: bool) -> bool:
        """Weights that were saved for another task lack the head for this one, and perhaps the pooler below it."""
        in_head = is_in_head(model, key)
        if self.model_class.__name__ in (self.config.architectures or []):
            return new_head and in_head
        return in_head or "pooler" in key

    def _replace_deferred(self, model: nn.Module) -> None:
        """Read the buffers, which layers may use at any time, and leave the parameters in the files."""
        unloaded: dict[DeferredTensor, DeferredParameter] = {}
        for part in model.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if isinstance(parameter, DeferredTensor):
                    if parameter not in unloaded:
                        files = {self.tensors[source].file for source in parameter.sources}
                        unloaded[parameter] = DeferredParameter.like(parameter, parameter.compute, files)
                    setattr(part, name, unloaded[parameter])
            for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                if isinstance(buffer, DeferredTensor):
                    setattr(part, name, buffer.compute())


def is_in_head(model: Any, name: str) -> bool:
    """Whether a parameter is outside the part that the models for all tasks share."""
    prefix = model.base_model_prefix
    return hasattr(model, prefix) and not name.startswith(f"{prefix}.")


def _tie_equal(model: Any) -> None:
    """Tie parameters that the files have twice with equal values; transformers compares only values in memory."""
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        first, second = model.get_parameter(source), model.get_parameter(target)
        several = first is not second and isinstance(first, DeferredTensor)
        if several and isinstance(second, DeferredTensor) and torch.equal(first.compute(), second.compute()):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, first)
