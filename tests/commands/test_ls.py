from __future__ import annotations

import pytest

from gpipe_cli.commands.ls import PLURALS, TOPICS
from tests.support.command_line import Gpipe


@pytest.mark.parametrize(
    "word", ["models", "data", "recipes", "balance", "schedules", "engines", *TOPICS, *PLURALS]
)
def test_every_group_can_be_listed(gpipe: Gpipe, word: str) -> None:
    answer = gpipe("ls", word)
    assert answer.code == 0 and answer.out.endswith("\n") and answer.err == ""


def test_a_pipe_gets_one_line_per_option_with_its_facts(gpipe: Gpipe) -> None:
    rows = [line.split("\t") for line in gpipe("ls", "models").out.splitlines()]
    assert next(row for row in rows if row[0] == "resnet18")[:4] == ["resnet18", "11181642", "10", "3x32x32"]
    assert all(len(row) == 5 for row in rows)


def test_without_a_topic_every_line_begins_with_its_topic(gpipe: Gpipe) -> None:
    listed = {line.split("\t")[0] for line in gpipe("ls").out.splitlines()}
    assert listed == set(TOPICS)


def test_json_is_one_document(gpipe: Gpipe) -> None:
    engines, groups = gpipe("ls", "engines", "--json").json, gpipe("ls", "--json").json
    assert [row["name"] for row in engines] == ["offload", "processes", "single", "threads"]
    assert set(groups) == set(TOPICS) and groups["engine"] == engines
    assert all(row["description"] for rows in groups.values() for row in rows)


def test_a_terminal_gets_tables(gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = gpipe("ls", "models", "engines").out
    assert "11.18M" in out and "parameters" in out and "threads" in out
