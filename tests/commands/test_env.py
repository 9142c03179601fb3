from __future__ import annotations

import torch

from tests.support.command_line import Gpipe


def test_the_environment_is_a_list_to_paste_and_one_json_document(gpipe: Gpipe) -> None:
    facts = gpipe("env", "--json").json
    lines = gpipe("env").out.splitlines()
    assert facts["torch"] == torch.__version__
    assert [line.split(":")[0].removeprefix("- ") for line in lines] == list(facts)
    assert f"- torch: {torch.__version__}" in lines
