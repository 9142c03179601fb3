"""The nn.Module that every pipe is: a module that looks like the sequence it wraps.

state_dict, load_state_dict, parameters and buffers use the names of the original module, for every balance. Loading
also understands torchgpipe's `partitions.N.` prefix. A pipe calls its layers one by one, so a hook on the sequence
itself would never run; registering one raises.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from types import TracebackType
from typing import Any, Self, TypeAlias, final

from torch import Tensor, nn

from gpipe_cli.pipeline.batchnorm import convert_deferred_batch_norm, deferred_batch_norms
from gpipe_cli.pipeline.layer import layers_of
from gpipe_cli.pipeline.loss import LossFunction, Reduction, StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value, gather
from gpipe_cli.pytree import flatten, unflatten
from gpipe_cli.sequential import original_output
from gpipe_cli.sequential.sequence import find_original, layer_paths
from gpipe_cli.skip.skippable import verify_skippables

Output: TypeAlias = Value | dict[str, Tensor]
"""A dict where the original model returns one."""

_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCHGPIPE_PREFIX = re.compile(r"^partitions\.\d+\.")


class PipeModule(nn.Module):
    def __init__(self, module: nn.Sequential, chunks: int, deferred_batch_norm: bool) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError(
                "non-sequential module cannot be partitioned; give nn.Sequential(*layers), or to_sequential(model, x)"
            )
        self.chunks = int(chunks)
        if self.chunks <= 0:
            raise ValueError(f"number of chunks must be positive integer (chunks: {chunks})")
        self.least_rows = 1
        """Rows that every layer needs in training mode: 2 for a batch norm with one value per channel and row. A
        mini-batch that is too small for `chunks` such micro-batches is split into fewer."""
        if len(set(module.children())) < len(module):
            raise ValueError("module with duplicate children is not supported")
        # Before anything is changed: a module that is refused must be as it was.
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
        self.register_load_state_dict_pre_hook(_rename_keys_of_parent)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_report_own_names)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.module)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    def _layer_containers(self) -> list[Iterable[nn.Module]]:
        """The containers in which users see the layers, and could replace them."""
        return [self.module]

    def _check_layers(self) -> None:
        """Raise if the layers are no longer those that the constructor looked at."""
        if any(
            child is not layer
            for container in self._layer_containers()
            for child, layer in zip_longest(container, self._layer_modules)
        ):
            raise RuntimeError(
                "a layer of the pipe was replaced, added or removed after the pipe was constructed. Construct a new "
                "pipe from the changed module"
            )

    def _original_output(self, value: Value) -> Output:
        """The output as the original model returns it; () where the last layer is in another process."""
        if isinstance(value, tuple) and not value:
            return ()
        output: Output = original_output(self.module, value)
        return output

    def _step_loss(
        self,
        batch: MiniBatch,
        target: Value,
        loss_fn: LossFunction,
        reduction: Reduction,
        keeps_outputs: bool,
    ) -> StepLoss:
        module = self.module

        def function(output: Value, target: Value) -> Tensor:
            return loss_fn(original_output(module, output), target)

        return StepLoss(
            function,
            target,
            batch.rows,
            len(batch.inputs),
            given=loss_fn,
            reduction=reduction,
            keeps_outputs=keeps_outputs,
        )

    def _step_result(self, loss: StepLoss, return_output: bool) -> Tensor | tuple[Tensor, Output]:
        if not return_output:
            return loss.total()
        if not loss.outputs:
            return loss.total(), ()
        tensors, template = gather([flatten(output, "output") for output in loss.outputs])
        return loss.total(), self._original_output(unflatten(template, tensors))

    @abstractmethod
    def close(self) -> None:
        """End the threads or processes that run for this pipe. You may close it twice."""

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
            attribute = None if module is None else find_original(module, name)
            if attribute is None:
                raise
            return attribute

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def _rename_keys_of_parent(pipe: PipeModule, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
    """A module that holds a pipe does not call `load_state_dict` of the pipe but loads into its children."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        own = pipe._own_name(key.removeprefix(prefix))
        state_dict[f"{prefix}module.{own}"] = state_dict.pop(key)
    pipe._prefix = prefix


def _report_own_names(pipe: PipeModule, incompatible_keys: Any) -> None:
    """A parent reports missing and unexpected keys by the names it knows."""
    for keys in incompatible_keys:
        keys[:] = [
            pipe._prefix + key.removeprefix(f"{pipe._prefix}module.")
            if key.startswith(f"{pipe._prefix}module.")
            else key
            for key in keys
        ]


@final
class _NoHooks(OrderedDict[int, Any]):
    """Takes the place of the dictionary in which torch keeps hooks."""

    what = "the module"

    def __setitem__(self, key: int, hook: Any) -> None:
        raise RuntimeError(
            f"a hook on {self.what} would never run: a pipe calls its layers one by one. Register it on a layer, "
            "pipe[i], or on the pipe itself"
        )


def refuse_hooks(module: nn.Module, what: str) -> None:
    """Raise if `module` has hooks, and make registering one raise."""
    for kind in _HOOK_DICTS:
        if getattr(module, kind):
            raise ValueError(
                f"{what} has a hook, which would never run: a pipe calls its layers one by one. Register it on a "
                "layer instead"
            )
        none = _NoHooks()
        none.what = what
        setattr(module, kind, none)
