"""Count the bytes of tensors that operators create, while they are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.torch_internals.tensor_memory import storage_of, tensors_in_tree


@final
class LiveBytes(TorchDispatchMode):
    """A context manager: `peak` is the most that tensors created inside took at the same time, on any device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {storage_of(tensor) for tensor in tensors_in_tree((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in_tree(result):
            storage = tensor.untyped_storage()
            number = storage_of(tensor)
            # What an operator returns may be, or be a view of, what it was given.
            if number not in given and number not in self._live:
                self._live[number] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, number, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result
