"""Build a model of transformers whose parameters are still in the files.

`from_pretrained` itself does it, with deferred tensors in place of those in the files: so names, conversions, ties,
new heads and buffers are exactly those that transformers gives the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from gpipe_cli.errors import RunError
from gpipe_cli.models.hf.deferred import DeferredTensor, StoredTensor
from gpipe_cli.models.weights import head_refusal, listed, shape_text
from gpipe_cli.sequential.unloaded import UnloadedParameter


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
        unloaded: dict[DeferredTensor, UnloadedParameter] = {}
        for part in model.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                if isinstance(parameter, DeferredTensor):
                    if parameter not in unloaded:
                        files = {self.tensors[source].file for source in parameter.sources}
                        unloaded[parameter] = UnloadedParameter.like(parameter, parameter.compute, files)
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
