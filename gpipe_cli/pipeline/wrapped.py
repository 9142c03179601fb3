"""The face all pipes share: that of the sequence they wrap, and a step.

Decides that state_dict, load_state_dict, parameters and buffers go by the names of the module that was
given, whatever the balance, and that torchgpipe's `partitions.N.` prefix is understood when loading. Knows
nothing of running.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, overload

from torch import Tensor, nn

from gpipe_cli.pipeline.batchnorm import convert_deferred_batch_norm, deferred_batch_norms
from gpipe_cli.pipeline.hooks import refuse_hooks
from gpipe_cli.pipeline.layer import layers_of
from gpipe_cli.pipeline.loss import LossFunction, StepLoss
from gpipe_cli.pipeline.microbatch import Value, gather
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.pytree import flatten, unflatten
from gpipe_cli.sequential import original_output
from gpipe_cli.sequential.original_paths import find_original, layer_paths
from gpipe_cli.skip.skippable import verify_skippables

__all__ = ["WrappedSequence"]

Output: TypeAlias = Value | dict[str, Tensor]
"""A dict where the model that the sequence was made from returns one."""

_TORCHGPIPE_PREFIX = re.compile(r"^partitions\.\d+\.")


class WrappedSequence(nn.Module):
    """Base of the pipes: an nn.Module that answers as the sequence in `module` would."""

    def __init__(self, module: nn.Sequential, chunks: int, deferred_batch_norm: bool) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError("non-sequential module cannot be partitioned")
        self.chunks = int(chunks)
        if self.chunks <= 0:
            raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
        if len(set(module.children())) < len(module):
            raise ValueError("module with duplicate children is not supported")
        verify_skippables(module)
        if deferred_batch_norm:
            converted = convert_deferred_batch_norm(module)
            assert isinstance(converted, nn.Sequential), "the children are converted, not the sequence"
            module = converted
        refuse_hooks(module, "pipe.module")
        self.module = module
        self._layers = layers_of(module)
        self._layer_modules = [layer.module for layer in self._layers]
        self._batch_norms = tuple(deferred_batch_norms(module))
        self._prefix = ""
        self.register_load_state_dict_pre_hook(_loaded_by_a_parent)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_own_names)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.module)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        *,
        return_output: Literal[True],
    ) -> tuple[Tensor, Output]: ...

    def step(
        self,
        input: Value,
        target: Value,
        loss_fn: LossFunction,
        key: int | None = None,
        return_output: bool = False,
    ) -> Tensor | tuple[Tensor, Output]:
        """Forward and backward of a whole mini-batch: fills `.grad` and returns the detached mean loss."""
        self._check_layers()
        batch = MiniBatch.of(input, self.chunks, key)

        def loss_of(output: Value, target: Value) -> Tensor:
            return loss_fn(original_output(self.module, output), target)

        def make_loss() -> StepLoss:
            return StepLoss(loss_of, target, batch.rows, len(batch.inputs), keeps_outputs=return_output)

        loss = self._step(batch, make_loss)
        if not return_output:
            return loss.total()
        outputs = loss.outputs()
        if not outputs:
            return loss.total(), ()
        tensors, template = gather([flatten(output, "output") for output in outputs])
        return loss.total(), self._outside(unflatten(template, tensors))

    def forward(self, input: Value) -> Output:
        self._check_layers()
        # Without layers there is nothing to split the input for.
        return self._outside(self._forward(input)) if self._layers else input

    def _holders(self) -> list[Iterable[nn.Module]]:
        """The containers in which users see the layers, and could replace them."""
        return [self.module]

    def _check_layers(self) -> None:
        """What is known of the layers was found when the pipe was made."""
        if any(
            child is not layer
            for holder in self._holders()
            for child, layer in zip_longest(holder, self._layer_modules)
        ):
            raise RuntimeError(
                "a layer of the pipe was replaced, added or removed after the pipe was made. Make a new pipe of the "
                "changed module"
            )

    def _outside(self, value: Value) -> Output:
        """What the original model gives; nothing where the last layer is in another process."""
        if isinstance(value, tuple) and not value:
            return ()
        output: Output = original_output(self.module, value)
        return output

    @abstractmethod
    def _forward(self, input: Value) -> Value:
        """Run the mini-batch forward; what the last layer gives, () if it is in another process."""

    @abstractmethod
    def _step(self, batch: MiniBatch, make_loss: Callable[[], StepLoss]) -> StepLoss:
        """Run the mini-batch forward and backward with a loss of `make_loss`, which it returns."""

    @abstractmethod
    def close(self) -> None:
        """End what runs for this pipe. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The signature is nn.Module's, whose overloads are too many to repeat for a delegation.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        given = {self._own_name(key): value for key, value in state_dict.items()}
        return self.module.load_state_dict(given, strict=strict, assign=assign)

    def _own_name(self, key: str) -> str:
        # A model may really have a child called 'partitions'; then its own names are the right ones.
        if any(name == "partitions" for name, _ in self.module.named_children()):
            return key
        return _TORCHGPIPE_PREFIX.sub("", key)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """By the paths of the original model, so that a module which holds a pipe gives its own names."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for path, layer in zip(layer_paths(self.module), self.module, strict=True):
            below = ".".join(filter(None, (prefix, path)))
            yield from layer.named_modules(memo, below, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Also what stands in the original model under that name: see `original_paths`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            found = None if module is None else find_original(module, name)
            if found is None:
                raise
            return found

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def _loaded_by_a_parent(
    pipe: WrappedSequence, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    """A module that holds a pipe does not call its `load_state_dict` but looks for the pipe's children."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        own = pipe._own_name(key.removeprefix(prefix))
        state_dict[f"{prefix}module.{own}"] = state_dict.pop(key)
    pipe._prefix = prefix


def _report_own_names(pipe: WrappedSequence, incompatible_keys: Any) -> None:
    """What a parent says of keys that are missing or too many goes by the names it knows."""
    for keys in incompatible_keys:
        keys[:] = [
            pipe._prefix + key.removeprefix(f"{pipe._prefix}module.")
            if key.startswith(f"{pipe._prefix}module.")
            else key
            for key in keys
        ]
