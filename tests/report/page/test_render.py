from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.formatting import printable
from gpipe_cli.report.page.charts import join, shape
from gpipe_cli.report.page.render import GENERATOR, environment, render_page
from gpipe_cli.report.page.run_record import read_run
from gpipe_cli.runs.directory import lock_run_directory
from tests.report.page.runs import HOSTILE, write_check, write_profile, write_training


class Reader(HTMLParser):
    """What a browser makes of a page: elements, their attributes, and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(), st.text())
def test_whatever_is_given_as_text_or_value_is_read_back_as_such(text: str, value: str) -> None:
    template = environment().from_string('<p class="{{ value }}">{{ text }}</p>')
    drawn = shape('<p class="{value}">{text}</p>', value=value, text=text)
    for page in (drawn, template.render(value=value, text=text)):
        reader = Reader()
        reader.feed(page)
        reader.close()
        assert reader.elements == [("p", {"class": printable(value)})]
        assert reader.text == printable(text)


def test_shapes_are_not_escaped_again_and_their_numbers_are_short() -> None:
    inner = shape('<b x="{x}" y="{y}">{text}</b>', x=1 / 3, y=20.0, text="<")
    assert shape("<p>{inner}{text}</p>", inner=join([inner, ">"]), text="&") == (
        '<p><b x="0.33" y="20">&lt;</b>&gt;&amp;</p>'
    )


def test_a_page_is_small_whole_and_names_no_other_place(tmp_path: Path) -> None:
    text = render_page([read_run(write_profile(tmp_path / "run"))])
    assert len(text) < 50_000 and GENERATOR in text[:4096]
    assert not re.search(r"https?:|url\(|@import|<link|\bsrc=", text)
    assert "default-src &#39;none&#39;; style-src &#39;sha256-" in text and "unsafe" not in text
    assert not re.search(r"\sstyle=|\son\w+=", text), "the policy would refuse it"


def test_what_was_not_recorded_has_no_section(tmp_path: Path) -> None:
    text = render_page([read_run(write_training(tmp_path))])
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Metrics by step", "Repeat or continue this run"]


def test_several_runs_are_compared_and_what_differs_is_listed(tmp_path: Path) -> None:
    runs = [read_run(write_training(tmp_path / name, length)) for name, length in (("a", 20), ("b", 30))]
    text = render_page(runs)
    differences = text[text.index("Settings that differ") :].split("</table>")[0]
    assert re.findall(r"<th>(.*?)</th>", differences) == ["run", "chunks"]
    assert re.findall(r"<td>(\d+)</td>", differences) == ["20", "30"]
    assert text.count('<article id="run') == 2 and text.count('<a href="#run1">chunks=30</a>') == 2


def test_equal_configurations_are_said_to_be_equal(tmp_path: Path) -> None:
    runs = [read_run(write_training(tmp_path / name)) for name in "ab"]
    assert "All runs have the same settings." in render_page(runs)


def test_hostile_text_is_nowhere_an_element(tmp_path: Path) -> None:
    run = write_check(write_profile(tmp_path / HOSTILE.replace("/", "_"), HOSTILE), HOSTILE)
    for file in ("config.yaml", "env.json"):
        (run / file).write_text(HOSTILE, encoding="utf-8")
    text = render_page([read_run(run)])
    assert text.count("<script>") == 1 and "<img" not in text and "\u202e" not in text and "\x1b" not in text


def test_memory_without_activations_says_so(tmp_path: Path) -> None:
    run = write_training(tmp_path)
    sizes = {"device": "cpu", "layers": 3, "parameter_bytes": 40}
    for known, warns in (({}, True), ({"activation_bytes": 80}, False)):
        launch = {"command": "train", "commands": [], "partitions": [{**sizes, **known}]}
        (run / "launch.json").write_text(json.dumps(launch), encoding="utf-8")
        assert (", without activations" in render_page([read_run(run)])) == warns


def test_weights_that_were_loaded_and_frozen_are_named(tmp_path: Path) -> None:
    run = write_training(tmp_path)
    frozen = {"patterns": ["stem", HOSTILE], "names": ["a", "b"], "elements": 1500, "all_elements": 2000}
    launch = {"commands": [], "loaded": "120 tensors of r18.pth", "frozen": frozen}
    (run / "launch.json").write_text(json.dumps(launch), encoding="utf-8")
    text = render_page([read_run(run)])
    assert "120 tensors of r18.pth" in text and "2 tensors, 1,500 of 2,000 parameters" in text
    assert text.count("<script>") == 1


def test_a_run_that_goes_on_reloads_its_page_and_a_finished_one_does_not(tmp_path: Path) -> None:
    run = write_training(tmp_path)
    finished = render_page([read_run(run)])
    (run / "summary.json").unlink()
    crashed = render_page([read_run(run)])
    with lock_run_directory(run):
        running = render_page([read_run(run)])
    reload = '<meta http-equiv="refresh"'
    assert reload in running and "This run is training." in running
    assert reload not in finished + crashed and 'class="state"' not in finished
    assert "it was killed, or the machine went down" in crashed
    assert f"<pre>gpipe train resume={run}</pre>" in crashed[crashed.index("went down") :]


def test_parameters_are_a_count_and_their_memory_is_bytes(tmp_path: Path) -> None:
    text = render_page(
        [read_run(write_training(tmp_path, parameters=11_000_000, parameter_bytes=44_000_000))]
    )
    assert "<dt>parameters</dt><dd>11.00M</dd>" in text
    assert "<dt>memory of parameters</dt><dd>41.96 MiB</dd>" in text


def test_a_check_has_its_rows_and_no_sections_of_a_run(tmp_path: Path) -> None:
    text = render_page([read_run(write_check(tmp_path / "check"))])
    assert re.findall(r'class="verdict ?(\w*)">(.*?)<', text) == [
        ("ok", "ok"),
        ("problem", "problem"),
        ("", "-"),
    ]
    assert '24.0 GB/s<p class="to-do">repair 24.0 GB/s</p>' in text
    assert "<dt>time</dt><dd>40.0 s</dd>" in text and "<dt>problem</dt><dd>1</dd>" in text
    assert "Repeat this check" in text and "<pre>gpipe check</pre>" in text and "gpipe profile" not in text


def test_a_run_shows_a_check_that_lies_beside_it(tmp_path: Path) -> None:
    run = write_check(write_training(tmp_path))
    text = render_page([read_run(run)])
    assert text.index("Metrics by step") < text.index("Check of the machine") and "<dt>eval loss</dt>" in text


def test_a_damaged_check_is_named(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_text("[", encoding="utf-8")
    assert "check.json: damaged" in render_page([read_run(tmp_path)])
