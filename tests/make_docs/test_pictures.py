"""The diagrams of the docs: well-formed, one bar per action, nothing that a page would have to fetch."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from gpipe_cli.schedule import order
from make_docs.__main__ import DOCS, PAGES
from make_docs.activations import kept, peak
from make_docs.run_pictures import visible_lines
from make_docs.schedules import EXAMPLES, Example, draw
from make_docs.svg import LEGEND

SVG = "{http://www.w3.org/2000/svg}"
DIAGRAMS = {name: make for name, make in PAGES.items() if name.endswith(".svg")} | {
    "timeline.svg": (DOCS / "timeline.svg").read_text
}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_well_formed_describes_itself_and_fetches_nothing(name: str) -> None:
    text = DIAGRAMS[name]()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.attrib["aria-label"]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_every_action_has_its_bar(example: Example) -> None:
    rects = ElementTree.fromstring(draw(example)).iter(f"{SVG}rect")
    bars = Counter(rect.attrib["y"] for rect in rects if rect.attrib["height"] == "24")
    actions = order(example.schedule, example.partitions, example.chunks, example.workers)
    recomputed = example.chunks * example.partitions_per_worker if example.recomputes else 0
    # Each row has one more bar in the background, which shows the idle time.
    assert sorted(bars.values()) == sorted(len(own) + recomputed + 1 for own in actions)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_legend_has_every_phase_of_its_diagram(example: Example) -> None:
    """The phases were a generator that the first look exhausted, so that every legend had `forward` alone."""
    root = ElementTree.fromstring(draw(example))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.attrib["height"] == "24"]
    drawn = {phase for rect in bars for phase in rect.attrib["class"].split() if phase in LEGEND}
    assert (
        {phase for phase, meaning in LEGEND.items() if meaning in texts} == drawn >= {"forward", "backward"}
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_page_of_schedules_states_the_idle_time_and_the_memory_of_its_diagrams(name: str) -> None:
    example = EXAMPLES[name]
    page = (DOCS / "concepts" / "schedules.md").read_text(encoding="utf-8")
    kept_whole = [peak(kept(example, worker)) * example.partitions_per_worker for worker in (0, 3)]
    row = f"| {example.schedule} | {100 * example.simulation().bubble:.0f} % | {{:g}}, {{:g}}".format(
        *kept_whole
    )
    assert row in page


def test_of_a_panel_that_redraws_itself_the_last_frame_is_visible() -> None:
    frames = (
        "epoch 1\r\n\x1b[32mloss 2\x1b[0m\r\x1b[2K\x1b[1A\x1b[2Kepoch 2\r\n\x1b[32mloss 1\x1b[0m\r\ndone\r\n"
    )
    assert visible_lines(frames) == ["epoch 2", "\x1b[32mloss 1\x1b[0m", "done", ""]
