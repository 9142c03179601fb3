"""The picture of ranks: a row per replica, a box per partition, and who sums gradients with whom."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from make_docs.svg import box, label, svg_file, tag

REPLICAS, PARTITIONS = 2, 4
LEFT, TOP, WIDTH, HEIGHT, GAP, ROW = 92, 40, 120, 44, 40, 96


def draw_ranks() -> str:
    description = f"{REPLICAS} replicas of {PARTITIONS} partitions are {REPLICAS * PARTITIONS} ranks"
    right = LEFT + PARTITIONS * (WIDTH + GAP)
    return svg_file(right, TOP + ROW * (REPLICAS - 1) + HEIGHT + 40, description, _elements())


def _elements() -> Iterator[Markup]:
    for partition in range(PARTITIONS):
        x = LEFT + partition * (WIDTH + GAP)
        yield label(f"partition {partition}", x + WIDTH / 2, TOP - 14, "middle")
        for replica in range(REPLICAS):
            y = TOP + ROW * replica
            rank = replica * PARTITIONS + partition
            yield box("layer", x, y, WIDTH, HEIGHT, f"rank {rank}", radius=5)
            if partition + 1 < PARTITIONS:
                middle = y + HEIGHT / 2
                yield tag(
                    "path", {"class": "arrow", "d": f"M {x + WIDTH + 4} {middle} H {x + WIDTH + GAP - 4}"}
                )
        middle = x + WIDTH / 2
        yield tag("path", {"class": "skip", "d": f"M {middle} {TOP + HEIGHT + 4} V {TOP + ROW - 4}"})
    for replica in range(REPLICAS):
        yield label(f"replica {replica}", LEFT - 12, TOP + ROW * replica + HEIGHT / 2 + 4, "end")
    bottom = TOP + ROW * (REPLICAS - 1) + HEIGHT + 26
    yield label("grey: activations and their gradients, per micro-batch", LEFT, bottom)
    yield label("violet: the sum of gradients, once per step", LEFT + 360, bottom)
