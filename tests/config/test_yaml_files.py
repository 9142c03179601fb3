from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.config.files import MOST_BYTES, check_references, load_yaml, parse_yaml
from gpipe_cli.errors import ConfigError

LAUGHS = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 8)}]\n" for i in range(12)
)
TALL = "a0: &a0 [[[[[[[[1]]]]]]]]\n" + "".join(
    f"a{i + 1}: &a{i + 1} [[[[[[[[*a{i}]]]]]]]]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(LAUGHS, "4: holds more than 5,000 values, its aliases replaced", id="alias bomb"),
        pytest.param(TALL, "nested more than 32 levels deep", id="nesting by aliases"),
        pytest.param("a: &a [*a]", "1: \\*a contains itself", id="recursive alias"),
        pytest.param("[" * 10**5, "1: is nested more than 32 levels deep", id="nesting, flow"),
        pytest.param(
            "".join(f"{' ' * i}a:\n" for i in range(300)), "nested more than 32", id="nesting, block"
        ),
        pytest.param("\n".join(f"k{i}: 1" for i in range(6_000)), "holds more than 5,000", id="many values"),
        pytest.param(f"a: {'9' * 400}", "1: a number of 400 digits", id="digits"),
        pytest.param(f"a: !!int '{'9' * 400}'", "1: a number of 400 digits", id="digits, tagged"),
        pytest.param(f"a: {'1:' * 30_000}1", "1: a number of 60001 digits", id="base 60"),
        pytest.param(f"a: {'${a:' * 300}{'}' * 300}", "nested too deeply", id="nested references"),
        pytest.param(
            "a: !!python/object/apply:os.system [true]", "1:4: could not determine", id="python tag"
        ),
        pytest.param("a: 1\na: 2", "2:1: found duplicate key a", id="duplicate key"),
        pytest.param("? [a]\n: 1", "unhashable", id="list as key"),
        pytest.param("a: !!timestamp 2001-01-01", "not a supported primitive", id="date"),
        pytest.param("a: \x01", "control characters", id="control character"),
    ],
)
def test_a_hostile_text_is_one_line_with_its_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^evil.yaml:.*{says}") as raised:
        parse_yaml(text, "evil.yaml")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_anchors_aliases_and_long_words_are_fine() -> None:
    text = f"a: &a {{b: 1}}\nc: {{<<: *a, d: [*a, *a]}}\nhash: {'f' * 300}\nquoted: '{'9' * 300}'\n"
    tree = parse_yaml(text, "mine.yaml")
    assert tree.c == {"b": 1, "d": [{"b": 1}, {"b": 1}]} and len(tree.quoted) == 300


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "large", "dangling", "bytes"])
def test_only_a_regular_file_of_bounded_size_is_read(tmp_path: Path, kind: str) -> None:
    """A FIFO as a recipe waited for a writer that never came, and /dev/zero filled the memory."""
    path = tmp_path / "mine.yaml"
    says = "not a regular file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"#" * (MOST_BYTES + 1))
        says = "at most 128 KiB"
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
        says = "No such file"
    else:
        path.write_bytes(b"a: \xff")
        says = "utf-8"
    with pytest.raises(ConfigError, match=says):
        load_yaml(path)


def doubling(reference: str) -> dict[str, Any]:
    """Thirty keys of which each refers to the next one twice."""
    return {
        "model": {**{f"a{i}": reference.format(next=i + 1) * 2 for i in range(30)}, "a30": "x"},
        "alias": "${model}",
    }


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("${{model.a{next}}}", "expand to more than"),
        ("${{ model.a{next} }}", "expand to more than"),
        ("${{.a{next}}}", "expand to more than"),
        ("${{model[a{next}]}}", "expand to more than"),
        ("${{oc.select:model.a{next},x}}", "expand to more than"),
        ("${{oc.decode:${{model.a{next}}}}}", "expand to more than"),
        ("${{alias.a{next}}}", "through another reference"),
        ("${{model.${{model.a{next}}}}}", "reference inside the name of another"),
    ],
)
def test_references_that_double_at_every_step_are_refused(reference: str, says: str) -> None:
    """A recipe of thirty lines kept OmegaConf busy for hours."""
    with pytest.raises(ConfigError, match=says):
        check_references(doubling(reference))


@pytest.mark.parametrize("tree", [{"a": "${a}"}, {"a": "${b}", "b": "${a}"}, {"a": {"b": "${a}"}}])
def test_a_reference_to_itself_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="refers to itself"):
        check_references(tree)


def test_plain_references_are_fine() -> None:
    check_references(
        {
            "batch_size": 4,
            "model": {"width": "${batch_size}", "layers": ["${..width}", {"heads": "${model.width}"}]},
            "run_dir": "runs/${oc.env:USER,${batch_size}}/${now:%Y}/${model.layers[1].heads}",
            "elsewhere": "${not.there}",
        }
    )
