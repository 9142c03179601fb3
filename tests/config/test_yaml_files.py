from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gpipe_cli.config.keys import conf_dir, resources_dir
from gpipe_cli.config.yaml_files import (
    MAX_CONFIG_BYTES,
    MAX_REFERENCES,
    check_content,
    check_references,
    load_yaml,
    parse_yaml,
)
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("a: &a [1]\nb: [*a, *a]", "2: \\*a is a YAML alias; repeat the value", id="alias"),
        pytest.param("a: &a {b: 1}\nc: {<<: *a}", "2: \\*a is a YAML alias", id="merge key"),
        pytest.param("[" * 10**5, "1: is nested more than 32 levels deep", id="nesting, flow"),
        pytest.param(
            "".join(f"{' ' * i}a:\n" for i in range(300)), "nested more than 32", id="nesting, block"
        ),
        pytest.param(f"a: {'9' * 5000}", "cannot be read: Exceeds the limit", id="digits"),
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


def test_long_words_are_fine() -> None:
    tree = parse_yaml(f"hash: {'f' * 300}\nquoted: '{'9' * 300}'\n", "mine.yaml")
    assert len(tree.quoted) == len(tree.hash) == 300


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
        path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
        says = "at most 64 KiB"
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
        says = "No such file"
    else:
        path.write_bytes(b"a: \xff")
        says = "utf-8"
    with pytest.raises(ConfigError, match=says):
        load_yaml(path)


def test_references_that_could_double_at_every_step_are_refused() -> None:
    """A recipe of thirty lines kept OmegaConf busy for hours."""
    tree: dict[str, Any] = {"model": {f"a{i}": f"${{model.a{i + 1}}}" * 2 for i in range(30)}}
    with pytest.raises(ConfigError, match=r"has 60 references \$\{...\}; gpipe takes at most 24"):
        check_references(tree)


def test_the_most_references_that_are_taken_are_resolved_at_once() -> None:
    """The worst that they can do: each text repeats the next one three times."""
    depth = MAX_REFERENCES // 3
    tree = {**{f"a{i}": f"${{a{i + 1}}}" * 3 for i in range(depth)}, f"a{depth}": "x"}
    check_references(tree)
    assert len(OmegaConf.create(tree).a0) == 3**depth


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hydra: {job: {env_set: {A: b}}}", "sets hydra.job.env_set.A: no file may configure Hydra"),
        ('"hyd\\x72a": {job: {env_set: {A: b}}}', "sets hydra.job.env_set.A"),
        ("hydra: {}", "sets hydra: no file may configure Hydra"),
        ("# @package hydra.job\nenv_set: {A: b}", "@package hydra.job: no file may configure Hydra"),
        ("# @package _global_.hydra\njob: {}", "@package _global_.hydra: no file may"),
        ("#   @package   _global_.hydra\njob: {}", "@package _global_.hydra: no file may"),
        ("# @package _global_.allow\na: b", "@package _global_.allow: a file may choose"),
        ("defaults: [override /hydra/launcher: x]", "override /hydra/launcher: x: no file may"),
        ("defaults: [override hydra/launcher: x]", "no file may configure Hydra"),
        ("defaults: [override /hydra/launcher: null]", "no file may configure Hydra"),
        ("defaults: [/hydra/job_logging: [a, b]]", "no file may configure Hydra"),
        ("defaults: [/model@hydra.job.env_set: x]", "no file may configure Hydra"),
        ("defaults: [/optimizer@_global_.hydra.job: x]", "no file may configure Hydra"),
        ("defaults: [/hydra/config]", "no file may configure Hydra"),
        ("defaults: [/other]", "defaults: /other: a file may choose options of gpipe's groups"),
        ("defaults: [override /model: '${oc.env:X}']", "choose an option by its name"),
        ("defaults: [override /model: ../../x]", "leaves the folder|choose an option"),
        ("allow: [os]", "allow: may only be given on the command line"),
        ("hydra.job.chdir: true", "sets hydra.job.chdir: no file may configure Hydra"),
        ("[1]", "its top level must be a mapping of keys"),
    ],
)
def test_a_file_chooses_options_and_sets_keys_and_nothing_else(text: str, says: str) -> None:
    header = re.search(r"@package +(\S+)", text)
    with pytest.raises(ConfigError, match=f"^evil.yaml: .*{says}"):
        check_content(
            OmegaConf.to_container(parse_yaml(text, "evil.yaml")), header and header[1], "evil.yaml"
        )


def test_what_shipped_files_and_recipes_say_is_taken() -> None:
    for path in (*conf_dir().rglob("*.yaml"), *(resources_dir() / "recipes").rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        header = re.search(r"^# @package (\S+)", text)
        check_content(OmegaConf.to_container(parse_yaml(text, path.name)), header and header[1], path.name)


def test_a_file_of_an_earlier_version_names_targets_as_this_version_does(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "data:\n  _target_: gpipe_cli.data.digits.build\n  root: ${seed}\nnote: gpipe_cli.data.digits.build\n"
    )
    tree = load_yaml(path)
    assert OmegaConf.to_container(tree) == {
        "data": {"_target_": "gpipe_cli.data.images.build_digits", "root": "${seed}"},
        "note": "gpipe_cli.data.digits.build",
    }
