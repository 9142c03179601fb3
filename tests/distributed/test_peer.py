from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from gpipe_cli.distributed.peer import Message, Peer
from tests.distributed.posted_operations import recording
from tests.distributed.rendezvous import RECEIVE, SEND
from tests.support.forked_ranks import run_ranks


def message(rank: int, count: int) -> Message:
    kinds = [
        torch.full((2, 3), float(rank)).t(),
        torch.tensor(rank),
        torch.empty(0, 4),
        torch.ones(3, dtype=torch.bool),
        torch.full((5,), 1.5 + rank, dtype=torch.bfloat16),
    ]
    tensors = {f"tensor {index}": kinds[index % len(kinds)] for index in range(count)}
    return Message(tensors, {"from": rank, "nothing": None})


def check(received: Message, expected: Message) -> None:
    assert received.notes == expected.notes
    assert list(received.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert received.tensors[name].dtype == tensor.dtype and torch.equal(received.tensors[name], tensor)


def exchanges(rank: int, ranks: int, folder: Path) -> None:
    world = distributed.group.WORLD
    assert world is not None
    other = 1 - rank
    peer = Peer(other, world, torch.device("cpu"))
    # 100 tensors need a longer header than the first message holds; the sides need not send the same.
    for mine, theirs in ((5, 5), (0, 5), (100, 0), (100, 100)):
        counts = (mine, theirs) if rank == 0 else (theirs, mine)
        check(peer.exchange(message(rank, counts[0])), message(other, counts[1]))
        if rank == 0:
            peer.send(message(rank, mine))
        else:
            check(peer.receive(), message(other, mine))
    peer.wait()
    with recording() as recorder:
        peer.exchange(message(rank, 3))
    kinds = [sorted(operation.kind for operation in batch) for batch in recorder.program]
    assert kinds == [[RECEIVE, SEND], [RECEIVE, RECEIVE, SEND, SEND]]


def test_messages_of_any_size_arrive_and_both_directions_are_one_batch(tmp_path: Path) -> None:
    run_ranks(exchanges, 2, tmp_path, 60)
