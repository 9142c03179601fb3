"""The pages hold: commands work, links lead somewhere, what is made is what the code makes, named tests exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from gpipe_cli import GPipe
from gpipe_cli.cli import main
from gpipe_cli.config.keys import known_keys, list_options
from gpipe_cli.config.schema import GROUPS, SCHEMAS
from make_docs.__main__ import DOCS
from make_docs.__main__ import PAGES as GENERATED
from tests.support.command_line import Gpipe
from tests.support.package_source import sources

TOP = Path(__file__).parent.parent
PAGES = [TOP / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(TOP)) for page in PAGES]
EXAMPLES = [
    TOP / "examples" / "your_own_model" / "mynet.py",
    TOP / "examples" / "first_model" / "mymodel.py",
    TOP / "examples" / "your_own_data" / "mydata.py",
    TOP / "examples" / "your_own_data" / "sentences.py",
    TOP / "examples" / "your_own_parts" / "myparts.py",
    TOP / "examples" / "nanogpt" / "nanogpt.py",
    TOP / "examples" / "nanogpt" / "pipelined.py",
]
RUN = "<the run's directory>"
EXISTING_RUNS = ("first", "mine")
"""Runs that a page's commands name, and that a test has to make before."""
CONFIG_FILES = ("config=my.yaml", "config=changed.yaml")
"""Files that a page's commands name; a test writes the first one of the page about files."""
FINE_TUNING = DOCS / "how-to" / "fine-tune-hugging-face.md"
FREEZING = DOCS / "how-to" / "fine-tuning.md"
PREDICTION = DOCS / "how-to" / "prediction.md"
TUTORIAL = DOCS / "get-started" / "first-model.md"
COMPLETE = [TOP / "README.md", *sorted((DOCS / "coming-from").glob("*.md"))]
"""Pages whose Python is a program."""
NANOGPT = DOCS / "coming-from" / "nanogpt.md"
IN_ORDER = (FINE_TUNING, FREEZING, PREDICTION, TUTORIAL, NANOGPT)
"""Their commands build on each other: test_fine_tuning.py, test_prediction_page.py and tests below run them."""
LONG = (
    "gpipe train model=resnet101 chunks=8",
    "gpipe train -m chunks=2,4,8",
    "gpipe train recipe=digits",
    "gpipe train config=my.yaml epochs=5",
    "gpipe train run_dir=mine resume=auto",
    "gpipe train run_dir=first",
    "gpipe check",
)
"""Commands of the README that run with `-m slow`: other tests prove the same."""

each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_blocks(page: Path) -> str:
    """Blocks of code have no links and no headings."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The gpipe commands of all console blocks, with a name for the placeholder of a run."""
    blocks = [block.replace("\\\n", "") for block in console_blocks(page)]
    lines = [line.split(" #")[0] for block in blocks for line in block.splitlines()]
    return [line.strip().replace(RUN, "first") for line in lines if line.startswith("gpipe ")]


def console_blocks(page: Path) -> list[str]:
    return re.findall(r"```console\n(.*?)```", text_of(page), flags=re.DOTALL)


def pasted(page: Path) -> Iterator[str]:
    """Commands and keys that a reader may copy from a page, with a word for each placeholder."""
    text = text_of(page)
    blocks = re.findall(r"```(?:console|sh)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    if page.suffix == ".yaml":
        lines = re.findall(r"^# (?:example: )?(gpipe .*)$", text.replace("\\\n#", ""), flags=re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", without_blocks(page))
    for line in [*lines, *(span for span in spans if not re.search(r", |\(", span))]:  # which is Python
        if re.match(r"gpipe (?!.*\[(key|flag))|'?[a-z_]+(\.[a-z_]+)*=", line) and page.name != "CHANGELOG.md":
            command = re.split(" [|<>] |(?<=>)[|]", line)[0]
            yield re.sub(r"<[^<>]*>", "x", command if command.startswith("gpipe ") else f"gpipe {command}")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_every_command_and_key_of_the_pages_and_the_help(tmp_path: Path) -> None:
    """`allow=[my_model]` without quotes is a pattern in zsh, which refuses to run the command."""
    files = [*PAGES, *(TOP / "conf").rglob("*.yaml")]
    lines = [line for path in files if path.name != "commands.md" for line in pasted(path)]
    quoted = [shlex.quote(line) for line in dict.fromkeys(line.partition(" #")[0] for line in lines)]
    script = "\n".join(["gpipe() { : }", *(f"(eval {line}) || print -r -- {line}" for line in quoted)])
    done = subprocess.run(
        ["zsh", "-f", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.stdout, done.stderr) == ("", "") and len(lines) > 500


def file_of_keys() -> str:
    page = text_of(DOCS / "how-to" / "configuration-files.md")
    return re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)[0]


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs name the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_blocks(page)))


def title(page: Path) -> str:
    return text_of(page).split("# ", 1)[1].splitlines()[0]


def listed(nav: Any) -> Iterator[tuple[str, str]]:
    """The titles and files of the pages that a navigation of mkdocs names, however deep."""
    for entry in nav:
        for name, value in entry.items():
            if isinstance(value, str):
                yield name, value
            else:
                yield from listed(value)


def test_the_pages_show_their_commands() -> None:
    readme, own_model = (commands(TOP / page) for page in ("README.md", "docs/how-to/your-own-model.md"))
    assert len(readme) >= 5 and "gpipe train run_dir=mine resume=auto" in readme
    assert len(own_model) >= 5


@each_page
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
        # The site holds docs/ alone: a page that leads out of it would lead nowhere there.
        assert page.parent == TOP or target.is_relative_to(DOCS), link


@each_page
def test_no_line_of_code_is_wider_than_a_page_of_the_site(page: Path) -> None:
    """At 1100 and at 1300 pixels a block shows 97 characters, in the size of docs/style.css, without a scroll bar."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)
    wide = [line for block in blocks for line in block.splitlines() if len(line) > 97]
    assert page.parent == TOP or wide == []


@each_page
def test_python_on_a_page_can_be_read_and_what_it_imports_is_there(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES[1].parent)
    for block in re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_navigation_names_every_page_once_by_its_title() -> None:
    """16 of 21 pages had three names: in the navigation, on the page and in links to it."""
    configuration = yaml.safe_load((TOP / "mkdocs.yml").read_text(encoding="utf-8"))
    named = sorted(listed(configuration["nav"]))
    assert named == sorted((title(page), str(page.relative_to(DOCS))) for page in PAGES[1:])


@each_page
def test_a_link_that_begins_like_a_title_is_the_title_of_its_page(page: Path) -> None:
    for text, name in re.findall(r"\[([A-Z][^\]]*)\]\(([^)\s#:]+\.md)\)", without_blocks(page)):
        # README.md puts `Coming from` before a list of such titles.
        assert title((page.parent / name).resolve()).removeprefix("Coming from ") in {
            " ".join(text.split()),
            " ".join(text.split()).removeprefix("Coming from "),
        }, name


@pytest.mark.parametrize("page", COMPLETE, ids=lambda page: page.stem)
def test_the_program_of_a_page_runs_and_fills_every_gradient(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL)
    (tmp_path / "page.py").write_text("".join(blocks), encoding="utf-8")
    ran = runpy.run_path("page.py")
    for value in list(ran.values()):
        if isinstance(value, GPipe):
            assert all(parameter.grad is not None for parameter in value.parameters())
            value.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # about five minutes on two idle cores
def test_the_tutorial_holds_from_the_first_command_to_the_exported_model(
    gpipe: Gpipe, tmp_path: Path
) -> None:
    shutil.copy(EXAMPLES[1], tmp_path)
    blocks = [block.replace("\\\n", "") for block in console_blocks(TUTORIAL)]
    for line in (line for block in blocks for line in block.splitlines()):
        if line.startswith("gpipe"):
            run_as_printed(gpipe, line)
        else:
            assert subprocess.run(shlex.split(line), capture_output=True).returncode == 0, line
    (block,) = re.findall(r"```python\n(.*?)```", text_of(TUTORIAL), flags=re.DOTALL)
    (tmp_path / "load.py").write_text(block, encoding="utf-8")
    subprocess.run([sys.executable, "load.py"], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_like_nanogpt_trains_unchanged_and_gets_its_weights_back(
    gpipe: Gpipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, model, pipelined = EXAMPLES
    (shown,) = re.findall(r"```py\n(.*?)```", text_of(NANOGPT), flags=re.DOTALL)
    assert text_of(pipelined).endswith(shown)
    for example in (model, pipelined):
        shutil.copy(example, tmp_path)
    dry_run, train, generate, export = commands(NANOGPT)
    assert "lm_head" in run_as_printed(gpipe, dry_run)
    run_as_printed(gpipe, train.replace("steps=200", "steps=2").replace("eval.batches=20", "eval.batches=1"))
    run_as_printed(gpipe, generate.replace("tokens=50", "tokens=2"))
    run_as_printed(gpipe, export)
    monkeypatch.syspath_prepend(tmp_path)
    original = runpy.run_path("nanogpt.py")
    gpt = original["GPT"](original["GPTConfig"](32, 256, n_layer=2, n_head=6, n_embd=48))
    gpt.load_state_dict(load_file("gpt.safetensors"))


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_what_the_code_generates_now(name: str) -> None:
    assert text_of(DOCS / name) == GENERATED[name](), "run `python -m make_docs`"


def test_every_test_that_the_promises_rest_on_exists() -> None:
    page = text_of(DOCS / "reliability.md")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 30
    for file, function in named:
        assert f"\ndef {function}(" in f"\n{(TOP / file).read_text(encoding='utf-8')}" or not function, (
            file,
            function,
        )


def test_the_messages_that_the_start_page_explains_are_in_the_package() -> None:
    rows = re.findall(r"^\| (`.*?) \| \d \|", text_of(DOCS / "index.md"), flags=re.MULTILINE)
    shown = [message for row in rows for message in re.findall(r"`(.*?)`", row)]
    package = "".join(sources().values())
    assert len(shown) > 10 and [message for message in shown if message not in package] == []


def test_every_model_of_the_example_is_trained_by_the_docs() -> None:
    models = re.findall(r"^def (\w+)\(num_classes", text_of(EXAMPLES[0]), flags=re.MULTILINE)
    shown = " ".join(line for page in PAGES for line in commands(page))
    assert models and all(f"mynet:{model} " in f"{shown} " for model in models)


def test_the_error_that_the_docs_show_is_the_one_that_is_given(gpipe: Gpipe, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES[0], tmp_path)
    page = " ".join(text_of(DOCS / "how-to" / "your-own-model.md").split())
    answer = gpipe("train", "model._target_=mynet.choosy", "allow=[mynet]")
    shown = re.sub(r"traced: \S*mynet\.py", "traced: mynet.py", " ".join(answer.err.split()))
    assert answer.code == 2 and shown in page


README_COMMANDS = commands(TOP / "README.md")
COMPARISON = next(
    block.splitlines() for block in console_blocks(TOP / "README.md") if "engine=single" in block
)
"""Lines of the README that compare a pipeline with the unsplit model."""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, for commands that name an existing run."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("gpipe_cli.data.images._HELD_OUT", 100)
        assert main(["train", "steps=1", "batch_size=16", "run_dir=run"]) == 0
    return folder / "run"


# The keys and options of all commands are looked up below, so by default only the README's are run.
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if line not in README_COMMANDS or line in LONG else [])
        for line in dict.fromkeys(line for page in PAGES if page not in IN_ORDER for line in commands(page))
        if line not in COMPARISON  # runs in order, as printed
    ],
)
def test_a_command_of_the_docs_works(
    gpipe: Gpipe, tmp_path: Path, line: str, request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    """One step, few samples and a minimum of measuring do not change whether the command line is correct."""
    monkeypatch.setattr("gpipe_cli.data.images._HELD_OUT", 100)  # evaluate every hundredth sample of a class
    for example in EXAMPLES:
        shutil.copy(example, tmp_path)
    words = shlex.split(line)[1:]
    for word in words:
        if word in CONFIG_FILES:
            (tmp_path / word.removeprefix("config=")).write_text(file_of_keys(), encoding="utf-8")
    for name in EXISTING_RUNS:
        forms = {f"run={name}", f"resume={name}", name, f"config={name}/config.yaml", f"run/{name}"}
        if forms & set(words):
            shutil.copytree(request.getfixturevalue("finished_run"), tmp_path / name)
    if "input=photos" in words:
        (tmp_path / "photos").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / "photos" / "1.png")
    answer = gpipe(*shortened(words))
    assert answer.code == 0, answer.err
    assert answer.out


def test_the_comparison_of_the_readme_holds_as_printed(gpipe: Gpipe) -> None:
    """`gpipe train steps=6` and `gpipe train steps=6 engine=single` differed in 102 of 122 tensors.

    A pipeline on a CPU has one thread per worker and `engine=single` has all cores. This test added threads=1 to both,
    so it could not fail.
    """
    *lines, compare = COMPARISON
    assert "\n".join(COMPARISON) + "\n" in console_blocks(DOCS / "concepts" / "bitwise-identical.md")
    digests = [
        digest for line in lines for digest in re.findall(r"sha256 +(\w+)", run_as_printed(gpipe, line))
    ]
    assert len(digests) == 2 and digests[0] == digests[1]
    assert subprocess.run(shlex.split(compare), capture_output=True).returncode == 0
    split, whole = (load_file(name) for name in shlex.split(compare)[1:])
    assert len(split) == 122 and [name for name in split if not torch.equal(split[name], whole[name])] == []


def run_as_printed(gpipe: Gpipe, line: str) -> str:
    program, *words = shlex.split(line)
    answer = gpipe(*words)
    assert program == "gpipe" and answer.code == 0, answer.err
    return str(answer.out)


def test_the_first_commands_of_the_readme_are_one_line_each_to_paste() -> None:
    assert console_blocks(TOP / "README.md")[0].splitlines() == [
        "pip install -c constraints.txt -e . && gpipe train",
        "pip install -c constraints.txt -e '.[test]' && pytest -n auto",
    ]
    assert len(text_of(TOP / "README.md").splitlines()) <= 130


OPTIONS = {group: {option.name for option in list_options(group)} for group in GROUPS}


def unknown(line: str) -> list[str]:
    """What a command names that there is not, without composing it: a key, an option of a group."""
    command, *words = shlex.split(line)[1:]
    if command not in SCHEMAS:
        return []
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    keys = known_keys(command)
    code = [key for key, value in pairs.items() if key in GROUPS and ":" in value]
    own = (
        *(f"{key}." for key in code),
        *(key.removesuffix("_target_") for key in pairs if key.endswith("._target_")),
    )
    wrong = [
        key
        for key in pairs
        if key not in keys and key not in GROUPS and not key.startswith(("hydra.", "hydra/", *own))
    ]
    return wrong + [
        f"{key}={value}"
        for key, value in pairs.items()
        if key not in code and value not in OPTIONS.get(key, {value})
    ]


def test_the_keys_and_options_of_every_command_exist() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert {line: unknown(line) for line in lines if unknown(line)} == {}


def test_the_tables_for_other_tools_name_keys_that_there_are() -> None:
    """`compile=layers` was in a table before it existed."""
    known = {*GROUPS, *(key for command in SCHEMAS for key in known_keys(command))}
    rows = [
        line
        for page in (DOCS / "coming-from").glob("*.md")
        for line in text_of(page).splitlines()
        if line.startswith("| `")
    ]
    named = [
        key
        for row in rows
        for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[2])
        for key in re.findall(r"(?:^| )'?([a-z_]+(?:\.[a-z_]+)*)=", code)
    ]
    assert len(named) > 50 and {key for key in named if key not in known} == {"model.n_layer"}


def test_the_search_finds_a_key_and_an_option_that_there_is_not() -> None:
    assert unknown("gpipe train chunk=8 schedule=1f2b model.name=a optimizer.lr=1") == [
        "chunk",
        "schedule=1f2b",
    ]


def shortened(words: list[str]) -> list[str]:
    """The command with keys that make it quick; threads and what else decides its results stay as printed."""
    command, *overrides = words
    if command == "train":
        # A resumed run may not change its batch size.
        resumes = any(word.startswith("resume=") and word != "resume=auto" for word in overrides)
        quick = ["steps=2"] if resumes else ["steps=1", "batch_size=16"]
    else:
        quick = {"plan": ["batch_size=8"], "profile": ["seconds=0"]}.get(command, [])
    measures = {"--by", "time"} <= set(overrides) or {"balance=time", "recipe=digits"} & set(overrides)
    if measures or (
        command == "profile" and not any(word.startswith(("balance=", "engine=")) for word in words)
    ):
        quick = [*quick, "balance.seconds=0"]
    if any("plan" in word for word in words):
        quick = [*quick, "plan.budget=0.1", *(["plan.verify_budget=0.1"] if "verify=true" in words else [])]
    replaced = {"epochs", *(word.partition("=")[0] for word in quick)}
    return [*(word for word in words if word.partition("=")[0] not in replaced), *quick]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed: pip install -e '.[docs]'",
)
def test_the_site_is_built_without_a_warning_and_names_no_other_place(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?://[^\"> ]+)", text_of(page)
        )
        assert not fetched, (page.name, fetched)
    browser = shutil.which("chromium")
    if browser is not None:
        found = [browser, "--headless", "--no-sandbox", "--virtual-time-budget=8000", "--dump-dom"]
        opened = subprocess.run(
            [*found, f"{(tmp_path / 'index.html').as_uri()}?q=checkpoint"], capture_output=True, text=True
        )
        assert re.search(r"\d+ matching documents", opened.stdout), "the search of a site opened from a disk"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_plain_gpipe_train_reaches_what_the_readme_promises(gpipe: Gpipe) -> None:
    summary = gpipe("train", "--json").json
    assert summary["top1"] >= 0.95
