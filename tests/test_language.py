"""The language of pages, messages and comments of configurations, as far as a pattern can find what is wrong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package_source import trees
from tests.test_docs import NAMES, PAGES, TOP, text_of, without_blocks

MAX_WORDS = 25
INSTEAD = {
    r"\bthose of\b": "repeat the noun",
    r"\bthat of (?=an?\b|the\b|its\b|each\b|every\b|one\b|torch)": "repeat the noun",
    r"\bthe ones? of\b": "repeat the noun",
    r", also ": "write `even`, `including` or `as well as`",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more than\b)": "write `is not a`",
    r"\b(?:to the (?:last )?bit|in every bit|(?:equal|the same) bits)\b": "write `bitwise identical`",
    r"\bleave it out\b": "write `remove it`",
    r"\b(?:says?|said|saying) so\b": "write what is printed",
    r"\bto speak of\b": "write how much",
}
"""Patterns, and what to write instead; CONTRIBUTING.md has the rules behind them."""

ANY = re.compile("|".join(INSTEAD), flags=re.IGNORECASE)

FILES = {
    **dict(zip(NAMES, PAGES, strict=True)),
    **{name: TOP / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
}
each_page = pytest.mark.parametrize("page", FILES.values(), ids=FILES)


def found_in(text: str) -> list[str]:
    joined = " ".join(text.split())
    if not ANY.search(joined):
        return []
    return [
        f"...{joined[max(0, match.start() - 30) : match.end() + 30]}...: {instead}"
        for pattern, instead in INSTEAD.items()
        for match in re.finditer(pattern, joined, flags=re.IGNORECASE)
    ]


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page, its list items and its cells, with each piece of code as one word."""
    page = re.sub(r"^ {4,}(?![-*]|\d+\.).*", "", page, flags=re.MULTILINE)  # code of a docstring
    page = re.sub(r"^#.*|^ *(?:[-*]|\d+\.) |^> ?|(?<!\\)\||<!--.*?-->", "\n\n", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`", "code", page).replace("**", "")
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    for paragraph in re.split(r"\n\s*\n", page):
        yield from re.split(r"(?<=[.!?])\)? ", " ".join(paragraph.split()))


def too_long(page: str) -> list[str]:
    return [text for text in sentences(page) if len(re.findall(r"\S*\w\S*", text)) > MAX_WORDS]


def messages() -> Iterator[tuple[str, str]]:
    """The text in the package that is not a docstring."""
    for path, tree in trees().items():
        statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
        docstrings = set(map(id, statements))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield f"{path}:{node.lineno}", node.value


@each_page
def test_a_page_has_no_phrase_that_the_rules_exclude(page: Path) -> None:
    assert found_in(re.sub(r"`[^`\n]*`", "code", without_blocks(page))) == []


@each_page
def test_a_sentence_of_a_page_has_at_most_25_words(page: Path) -> None:
    assert too_long(without_blocks(page)) == []


def test_no_message_has_a_phrase_that_the_rules_exclude() -> None:
    assert {place: found for place, text in messages() if (found := found_in(text))} == {}


@pytest.mark.parametrize("folder", ["conf", "recipes", "gpipe_cli/config"])
def test_no_comment_of_a_configuration_has_a_phrase_that_the_rules_exclude(folder: str) -> None:
    files = [path for path in (TOP / folder).rglob("*") if path.suffix in (".yaml", ".ini")]
    assert files and {path.name: found for path in files if (found := found_in(text_of(path)))} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The rates are those of the base model.", 1),
        ("Open the page, also while the run trains.", 1),
        ("A folder that is no image.", 1),
        ("If there is no test set, gpipe holds out samples; it is no longer needed.", 0),
        ("It equals the other run to the bit and says so.", 2),
        ("It also reads parquet files.", 0),
    ],
)
def test_a_phrase_that_the_rules_exclude_is_found(text: str, count: int) -> None:
    assert len(found_in(text)) == count


def test_sentences_are_told_apart_from_code_cells_and_items() -> None:
    words = " ".join(["word"] * 20)
    page = f"# Title\n\n{words} `a b c d e f g h` end. {words}:\n\n- {words}\n- {words}\n\n| {words} | {words} |\n"
    assert too_long(page) == [] and len(too_long(f"{words}\n{words}.")) == 1
