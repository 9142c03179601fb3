"""No order in which ranks post their operations can block under NCCL's semantics, whatever the schedule.

Real ranks post them over gloo, which would hide a bad order; the model of `rendezvous` then runs what they posted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpipe_cli.distributed.function_pipeline import Peer
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.schedule import names, traits
from tests.distributed.cases import THERE_AND_BACK
from tests.distributed.rendezvous import RECEIVE, SEND, WAIT, Batch, Deadlock, Mismatch, Operation, run
from tests.distributed.scenarios import MODELS, OWN_LOOP, Scenario, record

SCHEDULES = [*(name for name in names() if traits(name).torch_schedule), THERE_AND_BACK]


def send(peer: int, content: str = "x") -> Operation:
    return Operation(SEND, "pipe", (peer,), content)


def receive(peer: int, content: str = "x") -> Operation:
    return Operation(RECEIVE, "pipe", (peer,), content)


def one_by_one(*operations: Operation) -> list[Batch]:
    return [(operation,) for operation in operations]


def test_sends_that_meet_their_receives_in_order_complete() -> None:
    chain = [one_by_one(send(1)), one_by_one(receive(0), send(2)), one_by_one(receive(1))]
    assert run(chain) == 4
    assert run(chain, communicator_per_pair=True) == 4


def test_two_ranks_that_send_before_they_receive_wait_forever() -> None:
    with pytest.raises(Deadlock, match=r"rank 0 waits in .*; rank 1 waits in"):
        run([one_by_one(send(1), receive(1)), one_by_one(send(0), receive(0))])


def test_sends_in_a_circle_of_three_wait_forever() -> None:
    with pytest.raises(Deadlock):
        run([one_by_one(send((rank + 1) % 3), receive((rank - 1) % 3)) for rank in range(3)])


def test_a_batch_starts_its_operations_together() -> None:
    assert run([[(send(1), receive(1))], [(send(0), receive(0))]]) == 4
    assert run([[(send((rank + 1) % 3), receive((rank - 1) % 3))] for rank in range(3)]) == 6


def test_the_order_that_forward_backward_once_posted_is_rejected() -> None:
    """Two micro-batches on two ranks: the second output and the first gradient each waited to be received first."""
    first = one_by_one(send(1, "output 0"), send(1, "output 1"), receive(1, "gradient 0"))
    last = one_by_one(receive(0, "output 0"), send(0, "gradient 0"), receive(0, "output 1"))
    with pytest.raises(Deadlock):
        run([first, last])


def test_a_receive_without_a_send_waits_forever() -> None:
    with pytest.raises(Deadlock, match="rank 1 waits"):
        run([[], one_by_one(receive(0))])


def reduce(group: str = "pipe") -> Operation:
    return Operation("allreduce", group, (0, 1), "x")


def wait(number: int, group: str = "pipe") -> Operation:
    return Operation(WAIT, group, (number,), "")


def test_a_wait_for_a_collective_ends_when_all_of_its_ranks_have_started_it() -> None:
    assert run([one_by_one(reduce(), wait(0), send(1)), one_by_one(reduce(), wait(0), receive(0))]) == 4
    with pytest.raises(Deadlock, match=r"rank 0 waits in .*wait"):
        run([one_by_one(reduce(), wait(0), send(1)), one_by_one(receive(0), reduce(), wait(0))])


def test_messages_of_another_group_pass_a_collective_that_runs() -> None:
    programs = [
        one_by_one(reduce("data"), send(1), wait(0, "data")),
        one_by_one(receive(0), reduce("data"), wait(0, "data")),
    ]
    assert run(programs) == 4
    with pytest.raises(Deadlock):
        run(programs, collectives_block=True)


def test_collectives_of_a_group_run_in_the_order_in_which_a_rank_started_them() -> None:
    second = Operation("broadcast", "data", (0, 1), "x")
    with pytest.raises(Mismatch, match="allreduce x of rank 0, broadcast x of rank 1"):
        run([one_by_one(reduce("data"), second), one_by_one(second, wait(0, "data"), reduce("data"))])
    with pytest.raises(Deadlock, match=r"rank 0 waits .*data"):
        run([one_by_one(reduce("data")), []])
    start_all = one_by_one(reduce("data"), reduce("data"), second, wait(2, "data"), wait(0, "data"))
    assert run([start_all, start_all]) == 6


def test_operations_that_do_not_belong_together_are_found() -> None:
    with pytest.raises(Mismatch, match="pipe: a, number 0 of rank 0, b, number 0 of rank 1"):
        run([one_by_one(send(1, "a")), one_by_one(receive(0, "b"))])


def test_without_a_bound_device_a_batched_send_never_meets_a_single_receive() -> None:
    mixed = [[(send(1), receive(1))], one_by_one(receive(0), send(0))]
    assert run(mixed) == 4
    with pytest.raises(Deadlock):
        run(mixed, communicator_per_pair=True)


def scenarios(ranks: int, chunks: list[int], models: list[str]) -> Iterator[Scenario]:
    for schedule in (*SCHEDULES, OWN_LOOP):
        for model in models:
            # The functions for a loop of your own know nothing of skips and tied parameters.
            if schedule != OWN_LOOP or model in ("plain", "pairs"):
                yield from (Scenario(schedule, model, ranks, count) for count in chunks)
        # As many replicas as possible: the groups `data` and `pipe` alternate.
        if ranks % 2 == 0 and ranks > 2:
            yield from (Scenario(schedule, "plain", ranks, count, replicas=2) for count in chunks)
            if schedule != OWN_LOOP:
                yield Scenario(schedule, "tied", ranks, chunks[-1], replicas=2, sharded=True)


def check(cases: list[Scenario], folder: Path, seconds: float) -> int:
    count = 0
    for scenario, programs in record(cases, folder, seconds):
        for per_pair, block in ((False, False), (True, False), (False, True)):
            try:
                count += run(programs, communicator_per_pair=per_pair, collectives_block=block)
            except (Deadlock, Mismatch) as error:
                error.add_note(f"{scenario}, communicator per pair: {per_pair}, collectives block: {block}")
                raise
    return count // 3


def test_ranks_that_send_to_each_other_before_they_receive_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What forward_backward did: its outputs and gradients crossed one after the other."""

    def send_then_receive(peer: Peer, message: PartitionInput) -> PartitionInput:
        peer.send(message)
        return peer.receive()

    monkeypatch.setattr(Peer, "exchange", send_then_receive)
    with pytest.raises(Deadlock, match=r"rank 0 waits in .*send.*; rank 1 waits in .*send"):
        check([Scenario(OWN_LOOP, "plain", ranks=2, chunks=3)], tmp_path, 60)


@pytest.mark.parametrize(
    ("ranks", "chunks"),
    [pytest.param(2, [3], marks=pytest.mark.slow), (3, [4]), pytest.param(4, [2], marks=pytest.mark.slow)],
)
def test_what_ranks_post_completes_on_a_backend_that_blocks(
    ranks: int, chunks: list[int], tmp_path: Path
) -> None:
    models = ["skips", "tied", "pairs"]
    assert check(list(scenarios(ranks, chunks, models)), tmp_path, 200) > 1000


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_whatever_ranks_post_completes_on_a_backend_that_blocks(
    ranks: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chunks = sorted({1, 2, 3, ranks - 1, ranks, ranks + 1, 2 * ranks, 2 * ranks + 1} - {0})
    cases = [
        *scenarios(ranks, chunks, list(MODELS)),
        *(Scenario("interleaved", "plain", ranks, count, several=3) for count in chunks),
    ]
    record_property("scenarios", len(cases))
    record_property("operations", check(cases, tmp_path, 900))
