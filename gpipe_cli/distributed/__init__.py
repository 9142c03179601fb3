"""A model over several processes, from Python: one process per partition, replicated if there are more processes.

from gpipe_cli.distributed import setup_process_groups, partition_uniform, forward_backward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_cli.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from gpipe_cli.distributed.gradients import average_gradients, clip_grad_norm_
    from gpipe_cli.distributed.groups import (
        get_group,
        get_ranks_in_group,
        is_first_in_pipeline_group,
        is_last_in_pipeline_group,
        partition_uniform,
        setup_process_groups,
    )
    from gpipe_cli.distributed.pipeline_step import forward_backward, forward_eval

__all__ = [
    "average_gradients",
    "clip_grad_norm_",
    "forward_backward",
    "forward_eval",
    "get_group",
    "get_ranks_in_group",
    "is_first_in_pipeline_group",
    "is_last_in_pipeline_group",
    "partition_uniform",
    "setup_process_groups",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "average_gradients": "gradients",
        "clip_grad_norm_": "gradients",
        "forward_backward": "pipeline_step",
        "forward_eval": "pipeline_step",
        "get_group": "groups",
        "get_ranks_in_group": "groups",
        "is_first_in_pipeline_group": "groups",
        "is_last_in_pipeline_group": "groups",
        "partition_uniform": "groups",
        "setup_process_groups": "groups",
    },
)
