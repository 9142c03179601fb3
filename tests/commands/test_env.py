from __future__ import annotations

import pytest
import torch

from gpipe_cli.activity import activity
from tests.support.command_line import Gpipe


def test_the_environment_is_a_list_to_paste_and_one_json_document(gpipe: Gpipe) -> None:
    facts = gpipe("env", "--json").json
    lines = gpipe("env").out.splitlines()
    assert facts["torch"] == torch.__version__
    assert [line.split(":")[0].removeprefix("- ") for line in lines] == list(facts)
    assert f"- torch: {torch.__version__}" in lines


def test_a_terminal_shows_that_torch_is_imported(gpipe: Gpipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpipe env` showed nothing for its first 0.4 seconds: the library that torch loads first stops every thread."""
    shown: list[str] = []
    monkeypatch.setattr(activity, "now", shown.append)
    assert gpipe("env").code == 0
    assert shown == ["importing torch"]
