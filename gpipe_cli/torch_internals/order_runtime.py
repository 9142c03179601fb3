"""torch's runtime for a custom order: `_PipelineScheduleRuntime`, the base of its schedules of several stages.

torch adds sends and receives to the order itself. It takes any placement of stages on ranks, whole and split backwards,
and any number of micro-batches, as long as all of one call have one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime

_FORWARD = ("F", "SEND_F", "RECV_F")


@final
class OrderRuntime(_PipelineScheduleRuntime):
    def __init__(
        self, stages: Sequence[Any], n_microbatches: int, *, order: Sequence[Sequence[str]], **options: Any
    ) -> None:
        """order: the actions of each rank as torch writes them, such as 0F1."""
        super().__init__(stages, n_microbatches, **options)  # type: ignore[no-untyped-call]
        actions = {rank: [_Action.from_str(each) for each in own] for rank, own in enumerate(order)}
        self.pipeline_order = actions
        self._prepare_schedule_with_comms(actions)
        if not self._has_backward:
            # torch would skip the backwards, but not the gradients between two stages of one rank.
            self.pipeline_order_with_comms = {
                rank: [each for each in own if each.computation_type.value in _FORWARD]
                for rank, own in self.pipeline_order_with_comms.items()
            }


assert issubclass(OrderRuntime, PipelineScheduleMulti), "the rest of gpipe knows torch's public class"
