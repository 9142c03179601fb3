"""Which partition sends which skip where."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gpipe_cli.skip import Namespace, SkipLayout, Skippable, SkipRoute, skip_layout


def written(layout: SkipLayout) -> tuple[list[str], list[str]]:
    def shown(routes: tuple[tuple[SkipRoute, ...], ...]) -> list[str]:
        return [" ".join(f"{skip.name}{partition}" for skip, partition in row) for row in routes]

    return shown(layout.sends), shown(layout.receives)


def test_without_skips_there_are_no_routes() -> None:
    assert written(skip_layout([nn.Sequential(nn.ReLU()), nn.ReLU()])) == (["", ""], ["", ""])


def test_a_skip_within_a_partition_does_not_appear(layer: Callable[..., Skippable]) -> None:
    assert written(skip_layout([nn.Sequential(layer(stash="a"), layer(pop="a")), nn.ReLU()])) == (
        ["", ""],
        ["", ""],
    )


def test_skips_to_next_and_far_partitions_appear_at_both_ends_by_name(
    layer: Callable[..., Skippable],
) -> None:
    partitions = [layer(stash="ba"), layer(pop="a", stash="c"), nn.ReLU(), layer(pop="cb")]
    assert written(skip_layout(partitions)) == (["a1 b3", "c3", "", ""], ["", "a0", "", "b0 c1"])


def test_nested_skippables_are_found(layer: Callable[..., Skippable]) -> None:
    partitions = [
        nn.Sequential(nn.Sequential(layer(stash="a"))),
        nn.Sequential(nn.Sequential(layer(pop="a"))),
    ]
    assert written(skip_layout(partitions)) == (["a1", ""], ["", "a0"])


def test_skips_of_one_name_are_told_apart_and_ordered_by_namespace(layer: Callable[..., Skippable]) -> None:
    one, two = Namespace(), Namespace()
    partitions = [
        nn.Sequential(layer(stash="a").isolate(two), layer(stash="a").isolate(one)),
        layer(pop="a").isolate(one),
        layer(pop="a").isolate(two),
    ]
    assert written(skip_layout(partitions)) == (["a1 a2", "", ""], ["", "a0", "a0"])
