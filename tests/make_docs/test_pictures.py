"""The pictures of the docs: well-formed, one bar per piece of work, nothing that a page would have to fetch."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from gpipe_cli.schedule import order
from make_docs.pages import DOCS, PAGES
from make_docs.schedules import PICTURES, ScheduleExample, picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", [name for name in PAGES if name.endswith(".svg")])
def test_a_picture_is_well_formed_tells_what_it_shows_and_fetches_nothing(name: str) -> None:
    drawn = PAGES[name]()
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg" and root.attrib["aria-label"]
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("example", PICTURES.values(), ids=PICTURES)
def test_every_piece_of_work_has_its_bar(example: ScheduleExample) -> None:
    rows = ElementTree.fromstring(picture(example)).iter(f"{SVG}rect")
    bars = Counter(bar.attrib["y"] for bar in rows if bar.attrib["height"] == "24")
    actions = order(example.schedule, example.partitions, example.chunks, example.workers)
    recomputed = example.chunks * example.partitions_each if example.recomputes else 0
    # And one behind them all, for the time in which nothing is done.
    assert sorted(bars.values()) == sorted(len(own) + recomputed + 1 for own in actions)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_page_of_schedules_tells_the_idle_time_of_its_pictures(name: str) -> None:
    example = PICTURES[name]
    page = (DOCS / "concepts" / "schedules.md").read_text(encoding="utf-8")
    assert f"| {example.schedule} | {100 * example.simulation().bubble:.0f} % |" in page
