from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from gpipe_cli.distributed import (
    get_group,
    get_ranks_in_group,
    is_first_in_pipeline_group,
    is_last_in_pipeline_group,
    setup_process_groups,
)
from gpipe_cli.distributed.groups import backends_for, ranks_along, with_cpu_backend
from gpipe_cli.errors import ConfigError
from tests.distributed.conftest import Become


def test_the_last_axis_runs_fastest() -> None:
    axes = {"data": 2, "pipe": 3}
    assert ranks_along(axes, "pipe") == [[0, 1, 2], [3, 4, 5]]
    assert ranks_along(axes, "data") == [[0, 3], [1, 4], [2, 5]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_along_every_axis_each_process_is_in_one_group(sizes: list[int]) -> None:
    axes = {f"axis {index}": size for index, size in enumerate(sizes)}
    everybody = list(range(torch.Size(sizes).numel()))
    mesh = torch.arange(len(everybody)).reshape(sizes)
    for index, (name, size) in enumerate(axes.items()):
        groups = ranks_along(axes, name)
        assert sorted(rank for line in groups for rank in line) == everybody
        assert {tuple(line) for line in groups} == set(
            map(tuple, mesh.movedim(index, -1).reshape(-1, size).tolist())
        )


def test_a_process_knows_its_own_groups(become: Become) -> None:
    become(5, 8)
    setup_process_groups([("data", 2), ("pipe", 4)])
    assert get_ranks_in_group("pipe") == [4, 5, 6, 7] and get_ranks_in_group("data") == [1, 5]
    assert distributed.get_process_group_ranks(get_group("pipe")) == [4, 5, 6, 7]
    assert not is_first_in_pipeline_group() and not is_last_in_pipeline_group()


def test_sizes_may_be_quotients_that_are_whole_numbers(become: Become) -> None:
    """TorchDistPackage's example gives ("data", world_size / pp_size), a float, which raised a TypeError of torch."""
    become(5, 8)
    setup_process_groups([("pipe", 2), ("data", 8 / 2)])
    assert get_ranks_in_group("pipe") == [1, 5] and get_ranks_in_group("data") == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("axes", "model"),
    [
        ([("data", 2), ("pipe", 2), ("tensor", 2)], [4, 5, 6, 7]),
        ([("pipe", 2), ("data", 2), ("tensor", 2)], [0, 1, 4, 5]),
        ([("data", 2), ("pipe", 4)], [4, 5, 6, 7]),
        ([("pipe", 8)], list(range(8))),
    ],
)
def test_the_group_model_has_the_processes_of_a_replica(
    become: Become, axes: list[tuple[str, int]], model: list[int]
) -> None:
    become(5, 8)
    setup_process_groups(axes)
    assert get_ranks_in_group("model") == distributed.get_process_group_ranks(get_group("model")) == model


def test_without_model_parallelism_there_is_no_group_model(become: Become) -> None:
    become(5, 8)
    setup_process_groups([("data", 8)])
    with pytest.raises(ConfigError, match="no group 'model'; setup_process_groups made data"):
        get_group("model")
    assert get_ranks_in_group("global") == list(range(8))


@pytest.mark.parametrize(("rank", "ends"), [(4, (True, False)), (7, (False, True))])
def test_the_ends_of_a_pipeline_know_it(become: Become, rank: int, ends: tuple[bool, bool]) -> None:
    become(rank, 8, ("data", 2), ("pipe", 4))
    assert (is_first_in_pipeline_group(), is_last_in_pipeline_group()) == ends


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ([("data", 2), ("pipe", 3)], "data 2 x pipe 3 are 6 processes, there are 8; start as many"),
        ([("pipe", 8), ("pipe", 1)], "name each axis once"),
        ([], "name each axis once"),
        ([("data", 0), ("pipe", 8)], "every axis needs at least one process"),
        (
            [("data", 8 / 3), ("pipe", 3)],
            r"2.666\d* processes along 'data'; give a whole number. There are 8",
        ),
        ([("data", float("nan")), ("pipe", 3)], "nan processes along 'data'; give a whole number"),
    ],
)
def test_axes_that_make_no_mesh_are_refused(become: Become, axes: list[tuple[str, int]], says: str) -> None:
    become(5, 8)
    with pytest.raises(ConfigError, match=says):
        setup_process_groups(axes)


def test_a_group_that_was_not_made_is_refused_by_name(become: Become) -> None:
    become(5, 8)
    with pytest.raises(ConfigError, match="no group 'pipe': call setup_process_groups first"):
        get_group("pipe")
    setup_process_groups([("pipe", 8)])
    with pytest.raises(ConfigError, match="no group 'data'; setup_process_groups made pipe"):
        get_group("data")


def test_groups_end_with_the_processes_they_were_made_of(become: Become) -> None:
    become(5, 8)
    setup_process_groups([("pipe", 8)])
    distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="init_process_group first"):
        get_group("pipe")
    become(0, 8)
    with pytest.raises(ConfigError, match="call setup_process_groups first"):
        get_group("pipe")


def test_ranks_on_the_cpu_use_gloo() -> None:
    assert backends_for(torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(("kind", "name"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_an_accelerator_has_its_own_backend_and_the_cpu_keeps_gloo(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)
    assert backends_for(torch.device(kind, 1)) == f"cpu:gloo,{kind}:{name}"


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_backend_that_torch_was_built_without_is_named() -> None:
    says = r"devices: 'cuda:1' needs the backend nccl, which this build of torch does not have; use engine=threads"
    with pytest.raises(ConfigError, match=says):
        backends_for(torch.device("cuda", 1))


def test_a_type_of_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed has no backend for the type 'mtia'"):
        backends_for(torch.device("mtia", 0))


def test_a_group_without_a_backend_for_the_cpu_gets_gloo() -> None:
    assert with_cpu_backend("cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert with_cpu_backend("cpu:gloo,cuda:nccl") is None
