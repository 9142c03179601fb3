"""A model of a backend that blocks: it decides whether the operations that ranks post can all complete.

NCCL copies nothing aside: a send ends when it is received. The operations of one rank on one communicator run in the
order in which they were posted, except that those of a batch start together. This model is stricter: a rank starts
nothing, on whichever communicator, before its last send or receive has ended. So whatever it lets pass also completes
where the host waits for an operation at once, as it does while NCCL connects two ranks for the first time. Only a
collective may still run while the rank goes on, until the rank waits for it; `collectives_block` forbids that too.

Between two ranks, messages of one direction match in order. Nothing depends on timing then: each operation has one
possible counterpart, so one run of the model decides for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SEND, RECEIVE, WAIT = "send", "recv", "wait"


class Operation(NamedTuple):
    kind: str
    """SEND, RECEIVE, the name of a collective, or WAIT for one."""
    group: str
    members: tuple[int, ...]
    """The ranks of a collective's group; of a send or receive, the peer; of WAIT, the number of the collective."""
    content: str
    """The dtype and the number of elements, which both ends must agree on."""


Batch = tuple[Operation, ...]
"""Operations that a rank starts together; more than one only by `batch_isend_irecv`."""
Program = Sequence[Batch]
"""What one rank posts, in order."""


class Deadlock(Exception):
    """The ranks wait for each other in a circle, or one waits for a rank that has ended."""


class Mismatch(Exception):
    """Two operations meet that do not belong together."""


@dataclass
class _Rank:
    program: Program
    position: int = -1
    unmatched: int = 0
    """Operations of the current batch that wait for their counterpart."""
    completed: Counter[str] = field(default_factory=Counter)
    """By group, how many collectives of the rank have completed."""
    queues: defaultdict[str, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """By group, the collectives that have not completed: the first one waits for the other ranks."""

    @property
    def current(self) -> Batch:
        return self.program[self.position]

    @property
    def blocking(self) -> Batch:
        """What has not completed."""
        if self.position < len(self.program):
            return self.current
        return tuple(operation for queue in self.queues.values() for operation in queue)

    def waits_for(self, group: str) -> bool:
        """Whether the current operation is to wait for the collective of a group that completes next."""
        if self.position == len(self.program):
            return False
        (kind, own_group, members, _), *_ = self.current
        return kind == WAIT and own_group == group and members == (self.completed[group],)


def run(
    programs: Sequence[Program], *, communicator_per_pair: bool = False, collectives_block: bool = False
) -> int:
    """Run the programs to their end and return the number of operations; raise Deadlock or Mismatch.

    communicator_per_pair: as NCCL without a bound device, where a send or receive outside a batch has a communicator
    of its pair, and cannot meet one inside a batch.
    collectives_block: a rank waits for every collective at once.
    """
    if collectives_block:
        programs = [_with_waits(program) for program in programs]
    model = _Model(programs, communicator_per_pair)
    model.run()
    return sum(operation.kind != WAIT for program in programs for batch in program for operation in batch)


def _with_waits(program: Program) -> Program:
    """The same program with a wait after every collective."""
    posted: Counter[str] = Counter()
    result: list[Batch] = []
    for batch in program:
        result.append(batch)
        kind, group, *_ = batch[0]
        if kind not in (SEND, RECEIVE, WAIT):
            result.append((Operation(WAIT, group, (posted[group],), ""),))
            posted[group] += 1
    return result


class _Model:
    def __init__(self, programs: Sequence[Program], communicator_per_pair: bool) -> None:
        self._per_pair = communicator_per_pair
        self._ranks = [_Rank(program) for program in programs]
        self._offered: dict[object, dict[int | str, deque[tuple[int, str]]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        """By channel and end, the operations that wait there: their rank and content."""
        self._posted: Counter[tuple[str, tuple[int, int], str]] = Counter()

    def run(self) -> None:
        ready = deque(range(len(self._ranks)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        stuck = [(rank, state.blocking) for rank, state in enumerate(self._ranks) if state.blocking]
        if stuck:
            raise Deadlock("; ".join(f"rank {rank} waits in {operations}" for rank, operations in stuck))

    def _advance(self, rank: int) -> list[int]:
        """Start the next batch of a rank; the ranks that can go on by that."""
        state = self._ranks[rank]
        state.position += 1
        if state.position == len(state.program):
            return []
        kind, group, members, _ = state.current[0]
        if kind == WAIT:
            return [rank] if members[0] < state.completed[group] else []
        if kind not in (SEND, RECEIVE):
            return [rank, *self._post(rank, state.current[0])]
        assert not state.queues[group], "a collective of the same communicator would have to end first"
        state.unmatched = len(state.current)
        released = []
        for operation in state.current:
            for other in self._offer(rank, operation, batched=len(state.current) > 1):
                self._ranks[other].unmatched -= 1
                if not self._ranks[other].unmatched:
                    released.append(other)
        return released

    def _post(self, rank: int, operation: Operation) -> list[int]:
        """Start a collective, or let it wait for those before it; the ranks that waited for what completes by that."""
        queue = self._ranks[rank].queues[operation.group]
        queue.append(operation)
        if len(queue) > 1:
            return []
        released = []
        for other in self._offer(rank, operation, batched=False):
            state = self._ranks[other]
            state.queues[operation.group].popleft()
            if state.waits_for(operation.group):
                released.append(other)
            state.completed[operation.group] += 1
            if state.queues[operation.group]:
                # The next collective of that rank starts.
                following = state.queues[operation.group].popleft()
                released += self._post(other, following)
        return released

    def _offer(self, rank: int, operation: Operation, *, batched: bool) -> list[int]:
        """Add an operation; the ranks of all that are matched now: none, or every end of this one."""
        kind, group, members, content = operation
        if kind in (SEND, RECEIVE):
            (peer,) = members
            way = (rank, peer) if kind == SEND else (peer, rank)
            own_communicator = self._per_pair and not batched
            channel: object = (group, way, own_communicator)
            end: int | str = kind
            # gloo matches all messages of one direction in order. A communicator per pair must not match others.
            content = f"{content}, number {self._posted[group, way, kind]}"
            self._posted[group, way, kind] += 1
            ends: Iterable[int | str] = (SEND, RECEIVE)
        else:
            channel, end, ends, content = (group, members), rank, members, f"{kind} {content}"
        waiting = self._offered[channel]
        waiting[end].append((rank, content))
        if not all(waiting[other] for other in ends):
            return []
        matched = [waiting[other].popleft() for other in ends]
        if len({content for _, content in matched}) > 1:
            raise Mismatch(f"{group}: {', '.join(f'{content} of rank {rank}' for rank, content in matched)}")
        return [rank for rank, _ in matched]
