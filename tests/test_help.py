from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gpipe_cli.arguments import FLAGS, parse
from gpipe_cli.config.compose import compose_tree
from gpipe_cli.config.keys import FIRST, chosen_options, config_keys, key_table, list_options
from gpipe_cli.config.schema import GROUPS, NO_EFFECT, SCHEMAS
from gpipe_cli.config.words import Request
from gpipe_cli.engines.protocol import engine_traits
from gpipe_cli.errors import ConfigError
from gpipe_cli.help import COMMANDS, about, command_help, overview
from gpipe_cli.values import flatten


def shown(line: str) -> str:
    """What `gpipe <line>` prints, where --help is among the words."""
    command, *words = line.split()
    return command_help(command, parse(words, command))


def rows(text: str) -> list[str]:
    """The left column of the keys and groups."""
    return re.findall(r"^  (\w[\w.]*)(?:=| )", text.partition("\n\nFlags:")[0], flags=re.MULTILINE)


def examples(text: str) -> list[str]:
    (section,) = re.findall(r"^Examples:\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    return [line for line in str(section).splitlines() if not line.startswith("   ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_usage_and_four_examples(command: str) -> None:
    text = command_help(command)
    assert f"Usage: gpipe {command}" in text
    assert len(examples(text)) == 4 and all(line.startswith("  gpipe ") for line in examples(text))


def test_an_example_of_two_lines_can_be_pasted() -> None:
    assert (
        "    requeue=20 run_dir=/shared/run1 > job.sh"
        in about("launch-script").notes("example")[0].splitlines()
    )


def test_the_overview_names_every_command_and_four_examples_in_45_lines() -> None:
    text = overview()
    assert "Usage: gpipe <command>" in text and len(examples(text)) == 4
    assert len(text.splitlines()) <= 45
    assert "gpipe <command> --help" in text and "gpipe -sc install=bash" in text
    for name in COMMANDS:
        assert re.search(rf"^  {name} +{re.escape(about(name).description)}$", text, flags=re.MULTILINE)


LINES = [
    *(f"{command} --help" for command in COMMANDS),
    *(
        f"train {option} --help"
        for option in ("model=hf", "data=jsonl", "engine=offload", "recipe=vit_digits")
    ),
    "train --help model",
    "train --help e",
]


@pytest.mark.parametrize("text", [overview(), *map(shown, LINES)], ids=["--help", *LINES])
def test_every_line_fits_80_columns_and_ends_in_no_blank(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_is_shown_once_with_its_meaning(command: str) -> None:
    text = command_help(command)
    words = " ".join(text.split())
    for field in config_keys(command).values():
        assert rows(text).count(field.key) == 1
        assert field.meaning in words


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_option_of_every_group_is_shown_and_the_default_marked(command: str) -> None:
    text = " ".join(command_help(command).split())
    chosen = chosen_options(command)
    for group in chosen:
        names = (
            f"{option.name}*" if option.name == chosen[group].name else option.name
            for option in list_options(group)
        )
        assert f"Options: {', '.join(names)}." in text
        for key, (default, _) in chosen[group].keys.items():
            assert f"{group}.{key}={default}".strip() in text


def headings(text: str) -> list[str]:
    return re.findall(r"^([A-Z].*):$", text, flags=re.MULTILINE)


def test_the_keys_that_matter_most_come_first_and_the_rest_under_headings() -> None:
    text = command_help("train")
    order = headings(text)
    assert order[:3] == ["Examples", "Groups (group=option; * is chosen)", f"{FIRST} (key=default)"]
    assert order[-1] == "Flags" and {"Model and data", "The step", "The run", "Logging"} < set(order)
    first = text.partition(f"{FIRST} (key=default):\n")[2].partition("\n\n")[0]
    assert {"chunks", "batch_size", "epochs", "devices", "partitions", "resume"} < set(rows(first))
    assert "seed" not in rows(first)


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("train", ["epochs", "steps", "resume", "config"]),
        ("eval", ["split", "seed", "run", "which", "snapshot", "at", "weights", "config", "chunks"]),
        ("launch-script", ["kind", "nodes", "hosts"]),
        ("runs", ["folder", "watch", "config"]),
    ],
)
def test_the_commands_own_keys_come_before_those_of_all(command: str, keys: list[str]) -> None:
    first = command_help(command).partition(f"{FIRST} (key=default):\n")[2].partition("\n\n")[0]
    assert rows(first)[: len(keys)] == keys


def test_recipes_are_shown_where_they_can_be_used() -> None:
    """It called all of them tested, and six are for machines that nobody of us has."""
    recipes = list_options("recipes")
    here = ", ".join(option.name for option in recipes if "minutes" in option.facts)
    elsewhere = ", ".join(option.name for option in recipes if "devices" in option.facts)
    text = " ".join(command_help("train").split())
    assert f"A complete run, tested on two CPU cores. Options: {here}. For eight GPUs" in text
    assert f"not run by us: {elsewhere}." in text
    assert "recipe.scale=full" in text
    assert "A complete run" not in command_help("eval") and "recipe.scale" not in command_help("eval")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_are_those_it_takes(command: str) -> None:
    section = command_help(command).partition("\nFlags:\n")[2]
    for flag in FLAGS:
        takes = not flag.commands or command in flag.commands
        assert (re.search(rf"^  {re.escape(flag.usage)} ", section, flags=re.MULTILINE) is not None) is takes


def test_help_belongs_to_the_model_that_was_chosen() -> None:
    """It showed the keys of resnet18, whatever was chosen, and nowhere model.path."""
    text = shown("train model=hf --help")
    assert {"model.path", "model.lora.rank", "data.tokenizer"} < set(rows(text))
    assert "model.path=... required: directory" in " ".join(text.split())
    assert "hf*" in text and "text*" in text and "model.zero_init_residual" not in text
    assert "model.path" not in command_help("train")


def test_help_belongs_to_the_recipe_and_the_file_that_were_chosen(tmp_path: Path) -> None:
    text = shown("train recipe=hf_finetune --help")
    assert "hf_finetune*" in text and "1f1b*" in text and "model.path=..." in text
    assert "steps=150" in text and "optimizer.lr=0.00002" in text
    assert "chunks=16" in shown("train recipe=amoebanetd_memory recipe.scale=small --help")
    (tmp_path / "my.yaml").write_text("recipe: 'digits'\nmodel: hf\nchunks: 2\n")
    text = shown(f"train config={tmp_path / 'my.yaml'} --help")
    assert "digits*" in text and "hf*" in text and "model.path=..." in text
    os.mkfifo(tmp_path / "pipe.yaml")  # reading it would wait for ever
    for name in ("nowhere.yaml", "", "pipe.yaml"):
        assert "resnet18*" in shown(f"train config={tmp_path / name} --help")


def test_help_leaves_out_what_the_chosen_engine_ignores() -> None:
    ignored = {"balance", "balance.seconds", "partitions", "device_memory", "schedule.name", "shard"}
    assert ignored < set(rows(command_help("train")))
    assert not ignored & set(rows(shown("train engine=offload --help")))
    assert not ignored & set(rows(shown("train recipe=offload_digits --help")))
    assert "engine.slices" in shown("train engine=offload --help")
    assert "partitions" in rows(shown("train engine=processes --help"))


@pytest.mark.parametrize("option", list_options("engine"), ids=lambda option: option.name)
def test_the_keys_that_an_engine_ignores_are_found_without_importing_it(option: Any) -> None:
    assert set(option.ignores) == engine_traits(option.target).ignored_keys


def test_an_option_that_there_is_not_is_answered_as_without_help() -> None:
    with pytest.raises(ConfigError, match=r"model=resnt18: did you mean 'resnet18'\?"):
        shown("train model=resnt18 --help")
    assert "model.num_classes" not in shown("train model=nets:build --help")
    assert "chunks=4" in shown("train -m model=resnet18,resnet34 --help")
    assert "mine" not in shown("train model=mine --config-dir conf --help")


@pytest.mark.parametrize(
    ("line", "found", "not_found"),
    [
        ("train --help lr", ["optimizer.lr", "lr_schedule", "lr_schedule.rise"], ["chunks"]),
        ("train --help TRANSFORMER", ["model=gpt", "model=vit_b_16"], ["model=resnet18"]),
        ("train --help learning rate", ["optimizer.lr"], ["seed"]),
        ("train --help resnet101", ["model=resnet101", "recipe=resnet101_speed"], ["model=resnet18"]),
        ("train --help lora", ["model=hf model.lora.rank"], ["model.weights"]),
        ("train model=hf --help lora", ["model.lora.rank=null"], ["model=hf model.lora.rank"]),
        ("train --help dry", ["--dry-run"], ["--json", "chunks"]),
        ("ls --help json", ["--json"], ["--debug", "Usage"]),
    ],
)
def test_a_word_after_help_shows_only_what_matches(line: str, found: list[str], not_found: list[str]) -> None:
    text = shown(line)
    for name in found:
        assert re.search(rf"^  {re.escape(name)}\b", text, flags=re.MULTILINE), name
    for name in not_found:
        assert not re.search(rf"^  {re.escape(name)}\b", text, flags=re.MULTILINE), name
    search = line.partition("--help ")[2].casefold()
    blocks = re.split(r"\n(?=  \S)|\n\n", text)
    assert all(search in " ".join(block.split()).casefold() for block in blocks if block.startswith("  "))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --help chunsk", "did you mean 'chunks'?"),
        ("train --help resnet11", "did you mean 'resnet101'?"),
        ("train --help frobnicate", "see `gpipe train --help`"),
        ("ls --help jsno", "did you mean '--json'?"),
    ],
)
def test_a_word_that_matches_nothing_is_answered_in_one_line(line: str, hint: str) -> None:
    command, _, word = line.partition(" --help ")
    with pytest.raises(
        ConfigError, match=re.escape(f"nothing in the help of gpipe {command} matches '{word}'; {hint}")
    ):
        shown(line)


def test_help_is_asked_for_in_three_ways(gpipe: Callable[..., Any]) -> None:
    texts = [gpipe(*line.split()).out for line in ("train model=hf --help lora", "help train model=hf lora")]
    assert texts[0] == texts[1] and "model.lora.rank" in texts[0]
    assert gpipe("--help").out == gpipe("-h").out == gpipe().out == f"{overview()}\n"
    answer = gpipe("train", "--help", "frobnicate")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1


def composed_keys(command: str, words: tuple[str, ...]) -> set[str]:
    """The keys of the composed configuration, without those that its engine or command ignores."""
    tree = OmegaConf.to_container(compose_tree(Request(command, words)))
    assert isinstance(tree, dict)
    ignored = list(NO_EFFECT.get(command, ()))
    engine = chosen_options(command, words).get("engine")
    if engine is not None and any("engine=" in word or "=offload" in word or "2x2" in word for word in words):
        ignored += engine.ignores
    return {
        key
        for key, _ in flatten(tree)
        if not key.endswith("._target_")
        and key not in GROUPS
        and not f"{key}.".startswith(tuple(f"{name}." for name in ignored))
    }


FEW = {
    "model=hf",
    "model=unet",
    "engine=offload",
    "engine=single",
    "recipe=vit_digits",
    "recipe=offload_digits",
    "recipe=unet_speed",
}
ALL = [
    *(f"{group}={option.name}" for group in ("model", "engine") for option in list_options(group)),
    *(f"recipe={option.name}" for option in list_options("recipes")),
    *(f"recipe={option.name} recipe.scale=small" for option in list_options("recipes/small")),
    "recipe=resnet101_speed model=unet",
    "recipe=vit_digits model=hf data=digits",
]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        *((command, "") for command in SCHEMAS),
        *(pytest.param("train", line, marks=[] if line in FEW else pytest.mark.slow) for line in ALL),
    ],
)
def test_the_table_shows_the_keys_of_the_composed_configuration(command: str, line: str) -> None:
    words = tuple(line.split())
    table = key_table(command, words).keys() - {"config", "recipe.scale", "recipe", *GROUPS}
    assert table == composed_keys(command, words)
