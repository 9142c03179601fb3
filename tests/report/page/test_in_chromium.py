"""The page in a real browser: nothing leaves it, nothing in it becomes code, bars and curves answer the pointer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpipe_cli.report.page.predictions import png_uri
from gpipe_cli.report.page.render import render_page
from gpipe_cli.report.page.run_record import read_run
from tests.report.page.browser import CHROMIUM, Browser, browser
from tests.report.page.runs import HOSTILE, write_check, write_profile, write_training

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def shown(chromium: Browser, tmp_path: Path, *directories: Path, dark: bool = False) -> Browser:
    """The page of these runs, opened."""
    path = tmp_path / "page.html"
    path.write_text(render_page([read_run(directory) for directory in directories]), encoding="utf-8")
    chromium.errors.clear()
    chromium.open(path, dark=dark)
    return chromium


def is_undisturbed(chromium: Browser) -> bool:
    """No error, no warning, no other address."""
    return chromium.errors == [] and all(url.endswith("/page.html") for url in chromium.requests)


def tip(chromium: Browser) -> str | None:
    return chromium.value("tip.hidden ? null : tip.textContent")


def test_there_is_one_bar_per_piece_and_each_tells_of_itself(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, write_profile(tmp_path / "run"))
    for picture in ("predicted", "measured"):
        assert chromium.value(f"document.querySelectorAll('.{picture} .piece').length") == 12
    chromium.point_at(".measured .piece:has(.backward)")
    assert tip(chromium) == "B0: backward\npartition 0, micro-batch 0\n1.000 ms, from 4.000 ms"
    chromium.point_at("h1")
    assert tip(chromium) is None
    assert is_undisturbed(chromium)


def test_a_curve_tells_the_values_of_the_nearest_step(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, write_training(tmp_path / "run"))
    chromium.point_at(".area", across=0.999)
    assert tip(chromium) == "step 20\ntrain 0.05\neval 0.5"
    chromium.point_at(".area", across=0.06)
    assert tip(chromium) == "step 2\ntrain 0.5"
    assert is_undisturbed(chromium)


@pytest.mark.parametrize("name", [HOSTILE, "{{7*7}}", "javascript:alert(1)"])
def test_hostile_names_stay_text(chromium: Browser, tmp_path: Path, name: str) -> None:
    run = write_profile(tmp_path / name.replace("/", "_"), name)
    shown(chromium, tmp_path, run, write_training(tmp_path / "other", command=f"gpipe train {name!r}"))
    assert chromium.value("document.title") == "Comparison of 2 runs · gpipe"
    assert chromium.value("document.scripts.length") == 1 and chromium.value("document.images.length") == 0
    legible = name.replace("\x1b", "").replace("\u202e", "")
    assert chromium.value("document.querySelector('.layers td:nth-child(2)').textContent") == legible
    chromium.point_at(".layers .bar rect")
    assert tip(chromium) == f"{legible}\nforward ms: 1.500"
    assert is_undisturbed(chromium)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_as_wide_as_the_screen(chromium: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "page.html"
    runs = [
        read_run(write_profile(tmp_path / "profile")),
        read_run(write_training(tmp_path / "training")),
        read_run(write_check(tmp_path / "check", "24.0 GB/s " * 20)),
    ]
    path.write_text(render_page(runs), encoding="utf-8")
    chromium.open(path, width=width)
    assert chromium.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_images_are_shown_and_hostile_class_names_stay_text(chromium: Browser, tmp_path: Path) -> None:
    run = write_training(tmp_path / "run")
    sample = {"target": 1, "predicted": 0, "confidence": 0.5, "image": png_uri(bytes(12), 2, 2)}
    names = [f"{HOSTILE} {'long ' * 9}{index}" for index in range(30)]
    counts = [[7] * 30] * 30
    content = {"step": 3, "class_names": names, "counts": counts, "samples": [sample] * 12}
    (run / "predictions.json").write_text(json.dumps(content), encoding="utf-8")
    path = tmp_path / "page.html"
    path.write_text(render_page([read_run(run)]), encoding="utf-8")
    chromium.errors.clear()
    chromium.open(path, width=400)
    assert chromium.value("[...document.images].every(image => image.naturalWidth === 2)")
    assert chromium.value("document.images.length") == 12 and chromium.value("document.scripts.length") == 1
    assert chromium.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert chromium.errors == [] and all(url.startswith(("data:", "file:")) for url in chromium.requests)


def test_dark_is_dark(chromium: Browser, tmp_path: Path) -> None:
    run = write_profile(tmp_path / "run")
    grounds = [
        shown(chromium, tmp_path, run, dark=dark).value("getComputedStyle(document.body).backgroundColor")
        for dark in (False, True)
    ]
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]
    assert is_undisturbed(chromium)


def test_a_run_that_is_pointed_at_or_kept_stands_out(chromium: Browser, tmp_path: Path) -> None:
    shown(chromium, tmp_path, *(write_training(tmp_path / name, int(name)) for name in ("20", "30", "40")))
    faded = "document.querySelectorAll('.area polyline.faded').length"
    lines = chromium.value("document.querySelectorAll('.area polyline').length")
    chromium.point_at("button[data-run='1']")
    alone = chromium.value(faded)
    assert 0 < alone < lines
    chromium.point_at("h1")
    assert chromium.value(faded) == 0
    chromium.value("document.querySelector(\"button[data-run='1']\").click()")
    chromium.point_at("h1")
    assert chromium.value(faded) == alone
    chromium.point_at(".area", across=0.999)
    assert "chunks=" in (tip(chromium) or "")
    assert is_undisturbed(chromium)
