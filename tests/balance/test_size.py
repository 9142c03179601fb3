from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gpipe_cli.balance import balance_by_size
from gpipe_cli.balance.size import balance as by_size
from gpipe_cli.balance.size import memory_objective, memory_objective_of
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec
from tests.distributed.tasks import make


def twice(parameter: nn.Parameter) -> int:
    return 2 * parameter.nbytes


def test_large_layers_and_large_activations_weigh() -> None:
    wide = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4), *(nn.Linear(4, 4) for _ in range(4)))
    assert balance_by_size(wide, torch.rand(2, 4), partitions=2) == [1, 5]
    # Without parameters, what counts is the batch: the first layers keep most.
    narrowing = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.AdaptiveAvgPool1d(1), *(nn.Tanh() for _ in range(5)))
    assert balance_by_size(narrowing, torch.rand(64, 3, 32), partitions=2)[0] <= 2


def test_chunks_divide_the_sample_and_param_scale_multiplies_parameters() -> None:
    module = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Tanh(), nn.Tanh())
    sample = torch.rand(1024, 32)
    assert balance_by_size(module, sample, partitions=2, chunks=1, param_scale=0.0) == [2, 2]
    # 64 rows of 32 numbers are 8 KiB a layer, the parameters 4 KiB times 100.
    assert balance_by_size(module, sample, partitions=2, chunks=16, param_scale=100.0) == [1, 3]


def test_what_counts_is_the_memory_of_live_micro_batches() -> None:
    """Under 1f1b the first partition keeps most micro-batches, so it gets fewer of equal layers."""
    module = nn.Sequential(*(nn.Tanh() for _ in range(10)))
    sample = Sample(torch.rand(8, 8, requires_grad=True))
    result = by_size(memory_objective(module, sample, PipelineSpec("1f1b", 4, 8), twice), 4)
    assert result.layers == sorted(result.layers) and result.layers[0] < result.layers[-1]
    assert result.largest == result.lower_bound
    assert by_size(memory_objective(module, sample, PipelineSpec("gpipe", 2, 8), twice), 2).layers == [5, 5]


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    module[0].requires_grad_(False)
    memory = memory_objective(module, Sample(torch.rand(1, 10)), PipelineSpec("gpipe", 2, 1), twice)
    assert memory.cost(0, 0, 1) == 400
    assert memory.cost(1, 1, 2) == 800 + 40


def test_a_partition_before_the_first_trained_layer_keeps_no_input() -> None:
    module = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(3)))
    module[:2].requires_grad_(False)
    spec = PipelineSpec("gpipe", 2, 4, checkpoint="always")
    memory = memory_objective(module, Sample(torch.rand(1, 10)), spec, twice)
    assert memory.cost(0, 0, 2) == 2 * 400
    # Four inputs of 40 bytes to recompute from, and what the layer saves of one.
    assert memory.cost(1, 2, 3) == 2 * 400 + 4 * 40 + 40
    assert memory.cost(1, 1, 3) == 400 + 2 * 400 + 4 * 40 + 40


def test_keyword_arguments_are_a_sample_and_their_skips_count() -> None:
    """A mask that the last partition pops is kept for each of its micro-batches."""
    task = make("keyword_arguments", 4)
    assert sum(balance_by_size(task.model, task.input, partitions=3, chunks=2)) == len(task.model)
    facts = model_stats(task.model, Sample(task.input, task.target, task.loss), count_flops=False)
    spec = PipelineSpec("gpipe", 3, 2, checkpoint="always")
    memory, without = (
        memory_objective_of(task.model, given, spec, twice) for given in (facts, replace(facts, skips=()))
    )
    mask, lengths = 4 * 8, 8 * 4
    assert memory.cost(2, 6, 8) - without.cost(2, 6, 8) == 2 * mask
    assert memory.cost(1, 4, 6) - without.cost(1, 4, 6) == 2 * lengths
    assert memory.cost(1, 2, 4) == without.cost(1, 2, 4), "skips that only pass by"
