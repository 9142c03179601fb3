"""A model over several processes, from Python: one process per partition, in replicas if there are more.

    from gpipe_cli.distributed import setup_process_groups, partition_uniform, forward_backward

The names are given lazily: what is beside them is used where they are not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_cli.distributed.groups import (
        get_group,
        get_ranks_in_group,
        is_first_in_pipeline_group,
        is_last_in_pipeline_group,
        setup_process_groups,
    )

__all__ = [
    "get_group",
    "get_ranks_in_group",
    "is_first_in_pipeline_group",
    "is_last_in_pipeline_group",
    "setup_process_groups",
]

_HOMES = {
    "get_group": "groups",
    "get_ranks_in_group": "groups",
    "is_first_in_pipeline_group": "groups",
    "is_last_in_pipeline_group": "groups",
    "setup_process_groups": "groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
