"""Which partition sends which skip where."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gpipe_cli.skip import Namespace, SkipLayout, Skippable, SkipRoute, skip_layout


def summary(layout: SkipLayout) -> tuple[list[str], list[str]]:
    def names(routes: tuple[tuple[SkipRoute, ...], ...]) -> list[str]:
        return [" ".join(f"{skip.name}{partition}" for skip, partition in row) for row in routes]

    return names(layout.sends), names(layout.receives)


def test_without_skips_there_are_no_routes() -> None:
    assert summary(skip_layout([nn.Sequential(nn.ReLU()), nn.ReLU()])) == (["", ""], ["", ""])


def test_a_skip_within_a_partition_does_not_appear(layer: Callable[..., Skippable]) -> None:
    assert summary(skip_layout([nn.Sequential(layer(stash="a"), layer(pop="a")), nn.ReLU()])) == (
        ["", ""],
        ["", ""],
    )


def test_skips_to_next_and_far_partitions_appear_at_both_ends_by_name(
    layer: Callable[..., Skippable],
) -> None:
    partitions = [layer(stash="ba"), layer(pop="a", stash="c"), nn.ReLU(), layer(pop="cb")]
    assert summary(skip_layout(partitions)) == (["a1 b3", "c3", "", ""], ["", "a0", "", "b0 c1"])


def test_nested_skippables_have_routes_too(layer: Callable[..., Skippable]) -> None:
    partitions = [
        nn.Sequential(nn.Sequential(layer(stash="a"))),
        nn.Sequential(nn.Sequential(layer(pop="a"))),
    ]
    assert summary(skip_layout(partitions)) == (["a1", ""], ["", "a0"])


def test_skips_of_the_same_name_are_ordered_by_namespace(layer: Callable[..., Skippable]) -> None:
    first, second = Namespace(), Namespace()
    partitions = [
        nn.Sequential(layer(stash="a").isolate(second), layer(stash="a").isolate(first)),
        layer(pop="a").isolate(first),
        layer(pop="a").isolate(second),
    ]
    assert summary(skip_layout(partitions)) == (["a1 a2", "", ""], ["", "a0", "a0"])
