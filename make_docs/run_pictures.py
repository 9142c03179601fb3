"""`python -m make_docs.run_pictures`: estimate, profile and train on this machine, and draw pictures of that.

These pictures take time or are measured, so no test compares them. Other programs disturb the measurement: on a busy
Linux machine run `sudo chrt -r 1 python -m make_docs.run_pictures`, which takes precedence over them.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup
from rich.ansi import AnsiDecoder
from rich.console import Console

from gpipe_cli.report.page.run_record import TimelineRecord, read_run
from make_docs.__main__ import DOCS
from make_docs.memory import draw_memory
from make_docs.plans import draw_plan
from make_docs.svg import box, label, legend, svg_file

PROFILE = (
    "gpipe profile timeline=true steps=9 model=gpt model.width=256 data.context=64 chunks=8 schedule=1f1b"
    " checkpoint=never balance=time run_dir=profile"
)
TRAIN, CHECK = "gpipe train run_dir=first", "gpipe check"
WIDTH, LEFT, RIGHT = 860, 72, 8
TOP, ROW, BAR, GAP = 28, 30, 24, 0.6
COLUMNS, LINES = 100, 40
PAGE_SIZE = "1180,1230"
CHARTS = r'<figure class="chart">.*?</figure>'


def main() -> None:
    (DOCS / "memory.svg").write_text(draw_memory(), encoding="utf-8")
    (DOCS / "concepts" / "pictures" / "plan.svg").write_text(draw_plan(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(shlex.split(PROFILE), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder) / "profile"
        (DOCS / "timeline.svg").write_text(draw_timeline(run), encoding="utf-8")
        for name, command in (("terminal", TRAIN), ("check", CHECK)):
            (DOCS / f"{name}.svg").write_text(draw_terminal(command, Path(folder)), encoding="utf-8")
        photograph(Path(folder) / "first" / "report.html", DOCS / "report.png")


def draw_timeline(run: Path) -> str:
    """The predicted step of a profile above the measured one, to the same scale."""
    facts = read_run(run)
    assert facts.ideal is not None and facts.measured is not None, "profile with timeline=true"
    steps = {"predicted": facts.ideal, "measured": facts.measured}
    scale = (WIDTH - LEFT - RIGHT) / max(step.milliseconds for step in steps.values())
    titles = {
        name: f"{name}: {step.milliseconds:.0f} ms, idle {step.bubble or 0:.0%}"
        for name, step in steps.items()
    }
    block = TOP + ROW * len(facts.measured.lanes)
    elements = [
        *legend({bar.phase for bar in facts.measured.bars}, WIDTH - RIGHT),
        *(
            element
            for index, (name, step) in enumerate(steps.items())
            for element in _step(titles[name], step, scale, top=block * index)
        ),
    ]
    return svg_file(WIDTH, block * len(steps), "A training step, " + "; ".join(titles.values()), elements)


def _step(title: str, step: TimelineRecord, scale: float, top: float) -> Iterator[Markup]:
    yield label(title, LEFT, top + 15, "strong")
    for device in range(len(step.lanes)):
        y = top + TOP + ROW * device
        yield label(f"device {device}", LEFT - 8, y + BAR / 2 + 4, "end")
        yield box("idle", LEFT, y, scale * step.milliseconds, BAR)
    for bar in step.bars:
        if bar.phase == "copy":
            continue  # not visible at this scale
        x, width = LEFT + scale * bar.begin, scale * bar.milliseconds - GAP
        yield box(bar.phase, x, top + TOP + ROW * bar.lane, width, BAR, bar.label, radius=2)


def photograph(page: Path, picture: Path) -> None:
    """A screenshot of the page of a run by headless Chromium, with two charts, the timeline and the partitions."""
    shown = page.read_text(encoding="utf-8")
    for chart in re.findall(CHARTS, shown, flags=re.DOTALL)[2:]:
        shown = shown.replace(chart, "")
    page.write_text(shown, encoding="utf-8")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("install Chromium to take a screenshot of the report: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE_SIZE}"]
    command = [browser, *options, f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def draw_terminal(command: str, folder: Path) -> str:
    """Run a command on a terminal of its own and draw what the terminal shows in the end."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {command}", highlight=False)
    for line in AnsiDecoder().decode("\n".join(visible_lines(_terminal_output(command, folder)))):
        console.print(line)
    return console.export_svg(title=command, unique_id="terminal")


def _terminal_output(command: str, folder: Path) -> str:
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.environ.update(COLUMNS=str(COLUMNS), LINES=str(LINES), TERM="xterm-256color")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        words = shlex.split(command)
        os.execvp(words[0], words)
    output = bytearray()
    # On Linux, reading from a terminal whose last process has ended is an error, not the end of a file.
    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
    except OSError:
        pass
    os.waitpid(process, 0)
    return output.decode()


def visible_lines(output: str) -> list[str]:
    """What remains on the screen, with its colors. The live panel moves the cursor up and erases lines; no more."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b["):
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token.endswith("m") or not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return lines


if __name__ == "__main__":
    main()
