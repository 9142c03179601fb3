from __future__ import annotations

import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path

from tests.report.page.runs import write_profile, write_training
from tests.support.command_line import Gpipe


def test_a_trained_run_has_a_report_that_can_be_rebuilt(gpipe: Gpipe, tiny_run: Path) -> None:
    page = tiny_run / "report.html"
    first = page.read_text(encoding="utf-8")
    assert "gpipe train resume=run 'allow=[tiny_for_tests]'" in unescape(first)
    assert "gpipe profile timeline=true" in first and "gradient" in first
    page.unlink()
    answer = gpipe("report", "run")
    assert answer.code == 0 and answer.out.startswith("report  run/report.html")
    assert page.read_text(encoding="utf-8") == first


def test_the_report_of_a_resumed_run_lists_all_its_commands(gpipe: Gpipe, tiny_run: Path) -> None:
    assert gpipe("train", "resume=run", "steps=7", "chunks=4", "allow=[tiny_for_tests]").code == 0
    page = (tiny_run / "report.html").read_text(encoding="utf-8")
    assert "Repeat the run, in this order" in page and "resume=run" in page
    shown = page[page.index("See where time and memory go") :].split("</pre>")[0]
    line = "gpipe profile timeline=true config=run/config.yaml 'allow=[tiny_for_tests]'"
    assert line in unescape(shown)
    composed = gpipe("profile", "--cfg", "job", *shlex.split(line)[2:])
    assert composed.code == 0 and "chunks: 4\n" in composed.out


def test_a_run_whose_engine_records_no_steps_is_profiled_with_another(tiny: Gpipe) -> None:
    assert tiny("train", "run_dir=here", "steps=1", "engine=single").code == 0
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert "gpipe profile timeline=true config=here/config.yaml engine=threads" in page


def test_a_failed_run_has_a_report_too(tiny: Gpipe) -> None:
    answer = tiny("train", "run_dir=here", "model._target_=tiny_for_tests.broken")
    assert answer.code == 1
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert "An error ended this run: " in page and "Metrics by step" not in page and "Partitions" in page


def test_a_profile_has_a_page_with_its_timeline(tiny: Gpipe) -> None:
    result = tiny(
        "profile", "seconds=0", "timeline=true", "steps=2", "run_dir=here", "device_memory=1GiB", "--json"
    )
    assert result.code == 0, result.err
    page = Path("here/report.html").read_text(encoding="utf-8")
    assert 'class="timeline predicted"' in page and 'class="timeline measured"' in page
    assert page.count('class="piece"') > 20 and "limit 1.00 GiB" in page and "activation" in page


def test_runs_are_compared_on_a_page_of_their_own(gpipe: Gpipe) -> None:
    write_training(Path("a"))
    write_profile(Path("b"))
    comparison = gpipe("report", "a", "run=b", "--json").json
    assert (
        comparison["report"] == "comparison.html"
        and comparison["runs"] == ["a", "b"]
        and comparison["notes"] == []
    )
    assert "Comparison of 2 runs" in Path("comparison.html").read_text(encoding="utf-8")
    assert gpipe("report", "a", "b").code == 0, "a page of ours is replaced"


def test_a_report_replaces_no_other_file(gpipe: Gpipe) -> None:
    write_training(Path("a"))
    Path("mine.html").write_text("mine", encoding="utf-8")
    answer = gpipe("report", "a", "out=mine.html")
    assert answer.code == 2 and "out=mine.html: exists and is not a report" in answer.err
    assert gpipe("report", "a", "out=.").code == 2
    assert Path("mine.html").read_text(encoding="utf-8") == "mine"


def test_a_damaged_file_is_reported_on_stderr(gpipe: Gpipe) -> None:
    (write_training(Path("a")) / "env.json").write_text("{", encoding="utf-8")
    answer = gpipe("report", "a")
    assert answer.code == 0 and answer.err == "warning: a/env.json: damaged; the page leaves it out\n"


def test_a_report_is_built_without_torch(tmp_path: Path) -> None:
    write_training(tmp_path / "a")
    code = (
        "import sys; from gpipe_cli.cli import main; "
        "assert main(['report', sys.argv[1]]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], check=True, capture_output=True, timeout=60
    )
