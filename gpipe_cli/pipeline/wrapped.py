"""What every pipe shares with the sequence it wraps: names, order, indexing.

Decides that state_dict, load_state_dict, parameters and buffers go by the names of the module that was
given, whatever the balance, and that torchgpipe's `partitions.N.` prefix is understood when loading. Knows
nothing of running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["WrappedSequence"]

_TORCHGPIPE_PREFIX = re.compile(r"^partitions\.\d+\.")


class WrappedSequence(nn.Module):
    """Base of the pipes: an nn.Module that answers as the sequence in `module` would."""

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):
            raise TypeError("non-sequential module cannot be partitioned")
        self.module = module

    def __len__(self) -> int:
        return len(self.module)

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    # The signature is nn.Module's, whose overloads are too many to repeat for a delegation.
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        renamed = {_TORCHGPIPE_PREFIX.sub("", key): value for key, value in state_dict.items()}
        # A model may really have a child called 'partitions'; then its own names are the right ones.
        given = state_dict if "partitions" in dict(self.module.named_children()) else renamed
        return self.module.load_state_dict(given, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)
