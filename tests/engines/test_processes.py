"""engine=processes gives the bits of engine=single: every fact of every step, every tensor of the state at the end.

Real processes over gloo. Starting them takes longer than their work, so for each number of ranks they are started once
and do all the cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.distributed import gradient_buckets
from gpipe_cli.engines.collectives import Collectives
from gpipe_cli.engines.parameters import EngineParameters
from gpipe_cli.engines.protocol import BatchResult
from gpipe_cli.engines.state import EngineState
from gpipe_cli.engines.update import Update
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pipeline.layer import replica_key
from tests.distributed.cases import AVERAGED, MOMENTUM, ROUNDED, THERE_AND_BACK, Case, CaseResult, run
from tests.distributed.rank_pool import load_notes, load_result, load_whole, run_cases
from tests.distributed.tasks import make

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
CHECKPOINTS = ("never", "except_last", "always")

SPOILT = Case("perceptron", "1f1b", spoilt=0)
RESUMED = Case("tied", "interleaved", rows=(4, 4, 3), resumed=1, optimizer=f"AdamW{AVERAGED}")
SPLIT_AND_RECOMPUTED = Case("odd_borders", "zero_bubble", "always")
FAILING = Case("failing")
HALVES = Case("perceptron", "1f1b", replicas=2, rows=(8, 8), chunks=2, optimizer=f"AdamW{AVERAGED}")
SPLIT = Case("odd_borders", "zero_bubble", replicas=2, rows=(8, 3), chunks=2, optimizer=MOMENTUM)
MERGED = Case("frozen_norms", "1f1b", replicas=2, rows=(8, 3), chunks=2, optimizer=MOMENTUM, deferred=True)
MESHES = [
    SPLIT,
    MERGED,
    Case("odd_borders", THERE_AND_BACK, replicas=2, rows=(8, 3, 1), chunks=2, optimizer="SGD"),
    Case("tied_without_dropout", "gpipe", replicas=2, rows=(8, 3), chunks=2, optimizer="SGD"),
    Case("normed", "1f1b", replicas=2, rows=(8, 3, 1), chunks=2, optimizer="SGD", deferred=True),
    Case("keyword_arguments", "1f1b", replicas=2, rows=(8, 3), chunks=2, optimizer="SGD"),
]
OVERFLOWING = Case(
    "large_inputs", "1f1b", replicas=2, rows=(8,) * 9, chunks=2, precision="fp16", optimizer=MOMENTUM
)

SHARDED = {
    3: [
        Case("normed", "gpipe", replicas=3, rows=(9, 5, 1), chunks=2, optimizer="Adafactor"),
        Case("long_skips", "1f1b", replicas=3, rows=(6, 4), chunks=2, optimizer=f"AdamW{AVERAGED}"),
    ],
    4: [
        SPLIT,
        HALVES,
        MERGED,
        Case("frozen_start", "gpipe", replicas=2, rows=(8, 3), chunks=2, clip=None),
        OVERFLOWING,
        Case(
            "tied_without_dropout",
            "interleaved",
            replicas=2,
            rows=(8, 8, 3),
            resumed=1,
            optimizer=f"AdamW{AVERAGED}",
        ),
        Case("tied_in_bfloat16", "1f1b", replicas=2, chunks=2, optimizer=f"AdamW{ROUNDED}"),
    ],
}
"""Each runs with and without shard=optimizer."""

LAID_OUT = [
    Case("transposed", "gpipe", "always"),
    Case("sliced", "zero_bubble"),
    Case("expanded", "1f1b"),
    Case("transposed_gradient", "zero_bubble", "except_last"),
    Case("expanded_gradient", "1f1b"),
    Case("channels_last", "1f1b"),
]
"""Tensors and gradients that are not contiguous cross; sent contiguous, they gave other bits behind the boundary."""

EQUAL = {
    2: [
        *LAID_OUT,
        *(Case("perceptron", schedule, "except_last") for schedule in SCHEDULES),
        Case("residual", "gpipe", rows=(4,), chunks=2, optimizer="SGD"),
        SPLIT_AND_RECOMPUTED,
        Case("frozen_norms", "1f1b", "always", deferred=True),
        Case("perceptron", "1f1b", precision="fp16"),
        Case("normed_rows", "1f1b", "except_last", rows=(10, 6, 5, 2), least_rows=2),
        Case("own_checkpoints", "zero_bubble", "except_last"),
        Case("tied_in_bfloat16", "interleaved", rows=(4, 4), resumed=1, optimizer=f"AdamW{ROUNDED}"),
        RESUMED,
        Case("perceptron", THERE_AND_BACK, "except_last"),
        Case("long_skips", THERE_AND_BACK, "always", rows=(4,)),
        Case("tied_without_dropout", THERE_AND_BACK),
        Case("frozen_start", THERE_AND_BACK),
    ],
    3: [
        Case("long_skips", "zero_bubble", rows=(4,)),
        Case("odd_borders", "1f1b", "except_last"),
        Case("keyword_arguments", "1f1b", rows=(10, 3, 10, 9)),
        Case("frozen_start", "zero_bubble", ("except_last", "never", "always")),
    ],
    4: [Case("keyword_arguments", "interleaved", "except_last")],
}


MORE = {
    2: [
        Case("tied", "1f1b"),
        Case("long_skips", "1f1b", "always", rows=(4,)),
        Case("frozen_start", "1f1b"),
        Case("perceptron", "1f1b", deferred=True),
        Case("perceptron", "1f1b", precision="bf16"),
    ],
    3: [
        Case("keyword_arguments", "zero_bubble", "always"),
        Case("frozen_norms", "zero_bubble", "except_last"),
        Case("tied", "gpipe", "always", rows=(4,)),
    ],
    4: [
        Case("tied", "interleaved", "except_last", rows=(10,)),
        Case("odd_borders", "interleaved"),
        Case("perceptron", "zero_bubble"),
    ],
}
"""Left to the slow tests, because other cases prove nearly the same."""


def sharded(case: Case) -> Case:
    return replace(case, sharded=True)


BY_RANKS = {
    2: [*EQUAL[2], SPOILT, FAILING],
    3: [*EQUAL[3], *SHARDED[3], *map(sharded, SHARDED[3])],
    4: [*EQUAL[4], *dict.fromkeys([*MESHES, *SHARDED[4]]), *map(sharded, SHARDED[4])],
}
"""The failing case comes last, because the ranks cannot continue after it."""
LONG = {
    ranks: [
        *MORE[ranks],
        *(
            Case(task, schedule, CHECKPOINTS[(place + ranks) % 3], rows=(8,) * 19 + (9,), chunks=4)
            for task in ("residual", "long_skips", "tied")
            for place, schedule in enumerate(SCHEDULES)
        ),
    ]
    for ranks in (2, 3, 4)
}
"""Most have twenty steps, the last with an uneven batch; they combine every checkpoint mode with every schedule."""
ALL = [(ranks, case) for ranks, cases in EQUAL.items() for case in cases]

RankFolder = Callable[[int], Path]


def launch_cases(
    factory: pytest.TempPathFactory, by_ranks: Mapping[int, Sequence[Case]], seconds: float
) -> RankFolder:
    @functools.cache
    def folder(ranks: int) -> Path:
        made = factory.mktemp(f"ranks-{ranks}")
        with pytest.MonkeyPatch.context() as patch:
            # The models are small: with buckets of the real size they would all have a single one.
            patch.setattr(gradient_buckets, "BUCKET_BYTES", 100)
            run_cases(made, ranks, by_ranks[ranks], seconds)
        return made

    return folder


@pytest.fixture(scope="module")
def rank_folder(tmp_path_factory: pytest.TempPathFactory) -> RankFolder:
    """Maps a number of ranks to the folder with their results."""
    return launch_cases(tmp_path_factory, BY_RANKS, seconds=200)


@pytest.fixture(scope="module")
def long_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> RankFolder:
    return launch_cases(tmp_path_factory, LONG, seconds=3600)


def differing(expected: EngineState, actual: EngineState) -> list[str]:
    """The names of all tensors that are not equal to the bit, or that only one of the states has."""
    wrong = []
    for part in ("model", "buffers", "optimizer"):
        ours: dict[str, Tensor] = getattr(expected, part)
        theirs: dict[str, Tensor] = getattr(actual, part)
        wrong += sorted(ours.keys() ^ theirs.keys())
        wrong += [name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])]
    return wrong


def alone(case: Case) -> CaseResult:
    return run(case, case.alone(), case.batch)


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=[f"{ranks}-{case.name}" for ranks, case in ALL])
def test_ranks_give_the_bits_of_one_process(rank_folder: RankFolder, ranks: int, case: Case) -> None:
    assert_equal_to_one_process(case, rank_folder(ranks), ranks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_more_cases_and_more_steps_of_ranks_give_the_bits_of_one_process(
    long_rank_folder: RankFolder, ranks: int
) -> None:
    for case in LONG[ranks]:
        assert_equal_to_one_process(case, long_rank_folder(ranks), ranks)


def assert_equal_to_one_process(case: Case, folder: Path, ranks: int) -> None:
    expected, ours, notes = alone(case), load_whole(folder, case, ranks), load_notes(folder, case, 0)
    assert "error" not in notes, notes
    assert ours.facts == expected.facts[2 * case.resumed :]
    assert differing(expected.state, ours.state) == []
    assert ours.state.numbers == expected.state.numbers


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_know_the_same_facts(rank_folder: RankFolder, ranks: int) -> None:
    for case in EQUAL[ranks]:
        results = [load_result(rank_folder(ranks), case, rank) for rank in range(ranks)]
        assert all(result.facts == results[0].facts for result in results)


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)
def test_replicas_share_the_work_of_saving(rank_folder: RankFolder, case: Case) -> None:
    states = [load_result(rank_folder(4), case, rank).state for rank in range(4)]
    for first, second in zip(states[:2], states[2:], strict=True):
        largest = max(tensor.nbytes for state in (first, second) for tensor in state.model.values())
        assert abs(sum_of_bytes(first) - sum_of_bytes(second)) <= largest


def sum_of_bytes(state: EngineState) -> int:
    return sum(tensor.nbytes for tensor in (*state.model.values(), *state.buffers.values()))


def test_a_rank_keeps_its_own_part_of_the_model_only(rank_folder: RankFolder) -> None:
    case = next(case for case in EQUAL[2] if case.task == "residual")
    notes = [load_notes(rank_folder(2), case, rank) for rank in range(2)]
    assert sum(rank_notes["bytes"] for rank_notes in notes) == notes[0]["all_bytes"]
    assert all(0 < rank_notes["bytes"] < rank_notes["all_bytes"] for rank_notes in notes)


def test_a_split_backward_recomputes_each_layer_once(rank_folder: RankFolder) -> None:
    """torch's own split of the backward would run a checkpointed forward three times."""
    notes = [load_notes(rank_folder(2), SPLIT_AND_RECOMPUTED, rank) for rank in range(2)]
    assert [max(pair) for pair in zip(*(rank_notes["recomputed"] for rank_notes in notes), strict=True)] == [
        4 + 3
    ] * 8


def test_a_loss_that_is_not_finite_stops_all_ranks_with_the_place_it_came_from(
    rank_folder: RankFolder,
) -> None:
    notes = [load_notes(rank_folder(2), SPOILT, rank) for rank in range(2)]
    assert [rank_notes["error"] for rank_notes in notes] == ["NumericError"] * 2
    assert {rank_notes["text"] for rank_notes in notes} == {
        "the loss is nan; try a smaller optimizer.lr, clip_grad_norm=1 or precision=fp32"
    }
    place = "first output that is not finite: layer '0' (Linear) in partition 0, micro-batch 0"
    assert [rank_notes["notes"] for rank_notes in notes] == [[place]] * 2


def test_what_a_layer_raises_comes_out_as_it_is_with_its_place(rank_folder: RankFolder) -> None:
    """torch wraps it in an error of its own, and prints the whole schedule."""
    notes = load_notes(rank_folder(2), FAILING, 1)
    assert (notes["error"], notes["text"]) == ("ZeroDivisionError", "no reason")
    assert notes["notes"] == ["in partition 1, layer '3' (Failing), micro-batch 0, action F1.0 (forward)"]


def replicas_alone(case: Case) -> EngineState:
    """The state of two replicas that sum their gradients, computed by plain code in one process."""
    pipes = [plain_pipe(make(case.task, 1).model, chunks=case.chunks) for _ in range(2)]
    parameters, loss = list(pipes[0].parameters()), make(case.task, 1).loss
    make_optimizer = case.objective(loss, make(case.task, 1).model).optimizer
    assert make_optimizer is not None
    model, cpu = EngineParameters(pipes[0], make_optimizer), torch.device("cpu")
    alone = Collectives.alone(nn.Sequential(), cpu)
    update = Update(model, clip_grad_norm=case.clip, scale_loss=False, device=cpu, collectives=alone)
    for step in range(len(case.rows)):
        update.begin(0.01, 0)
        for replica, pipe in enumerate(pipes):
            pipe.train().zero_grad()
            input, target = case.batch(step, replica, 2)
            # Halves are exact, so it does not matter where a loss is halved.
            pipe.step(input, target, lambda *given: loss(*given) / 2, key=replica_key(step, replica))
        for first, second in zip(parameters, pipes[1].parameters(), strict=True):
            assert first.grad is not None and second.grad is not None
            first.grad += second.grad
        update.apply(BatchResult(0.0, 1, {}, 1.0), update.norms())
        for first, second in zip(pipes[0].buffers(), pipes[1].buffers(), strict=True):
            if first.is_floating_point():
                first.copy_((first + second) / 2)
        pipes[1].load_state_dict(pipes[0].state_dict())
    if model.must_exchange(averages=True):
        model.exchange_averages()  # a state has the averages
    return EngineState(pipes[0].state_dict(), optimizer=model.state(()).optimizer)


def test_replicas_are_bitwise_the_sum_of_those_that_work_alone(rank_folder: RankFolder) -> None:
    expected, ours = replicas_alone(HALVES), load_whole(rank_folder(4), HALVES, 4)
    assert "error" not in load_notes(rank_folder(4), HALVES, 0), load_notes(rank_folder(4), HALVES, 0)
    assert differing(expected, ours.state) == []


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)
def test_replicas_are_one_with_all_their_samples_but_for_rounding(
    rank_folder: RankFolder, case: Case
) -> None:
    """A batch of three samples gives them two and one; a batch of one leaves the second replica with none."""
    expected, ours = alone(case), load_whole(rank_folder(4), case, 4)
    assert "error" not in load_notes(rank_folder(4), case, 0), load_notes(rank_folder(4), case, 0)
    for mine, theirs in zip(ours.facts, expected.facts, strict=True):
        assert mine["samples"] == theirs["samples"]
        assert mine["sums"] == pytest.approx(theirs["sums"], rel=1e-6)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert (mine["grad_norm"] or 0) == pytest.approx(theirs["grad_norm"] or 0, rel=1e-6)
    for name, tensor in expected.state.model.items():
        apart = torch.linalg.vector_norm((ours.state.model[name] - tensor).double())
        assert apart <= 1e-6 * torch.linalg.vector_norm(tensor.double()), name


@pytest.mark.parametrize("case", [HALVES, *MESHES], ids=lambda case: case.name)
def test_replicas_stay_equal_to_the_bit(rank_folder: RankFolder, case: Case) -> None:
    own = [load_notes(rank_folder(4), case, rank)["own"] for rank in range(4)]
    assert own[:2] == own[2:] and own[0] != own[1]


SHARDED_CASES = [(ranks, case) for ranks, cases in SHARDED.items() for case in cases]


@pytest.mark.parametrize(("ranks", "case"), SHARDED_CASES, ids=[case.name for _, case in SHARDED_CASES])
def test_a_sharded_optimizer_gives_the_bits_of_a_whole_one(
    rank_folder: RankFolder, ranks: int, case: Case
) -> None:
    folder = rank_folder(ranks)
    for rank in range(ranks):
        whole, ours = load_notes(folder, case, rank), load_notes(folder, sharded(case), rank)
        assert "error" not in ours and "error" not in whole, (ours, whole)
        assert ours["own"] == whole["own"]
    expected, result = load_whole(folder, case, ranks), load_whole(folder, sharded(case), ranks)
    assert result.facts == expected.facts
    assert differing(expected.state, result.state) == []
    assert without_order(result.state.numbers) == without_order(expected.state.numbers)
    if case.precision == "fp16":  # training steps and evaluations alternate
        assert {facts["skipped"] for facts in expected.facts[::2]} == {True, False}


def without_order(numbers: Mapping[str, Any]) -> Any:
    optimizer = numbers.get("optimizer", {})
    return {
        **numbers,
        "optimizer": {**optimizer, "without_state": sorted(optimizer.get("without_state", ()))},
    }


@pytest.mark.parametrize(("ranks", "case"), SHARDED_CASES, ids=[case.name for _, case in SHARDED_CASES])
def test_a_replica_has_its_share_of_the_optimizer_s_state(
    rank_folder: RankFolder, ranks: int, case: Case
) -> None:
    folder, stages = rank_folder(ranks), ranks // case.replicas
    for stage in range(stages):
        of_stage = range(stage, ranks, stages)
        whole = [load_notes(folder, case, rank)["optimizer_bytes"] for rank in of_stage]
        shares = [load_notes(folder, sharded(case), rank)["optimizer_bytes"] for rank in of_stage]
        assert sum(shares) == whole[0] and set(whole) == {whole[0]}
    if case.task == "long_skips":
        assert max(shares) < 1.1 * whole[0] / case.replicas
