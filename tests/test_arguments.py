from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.arguments import parse
from gpipe_cli.errors import ConfigError


def test_flags_and_overrides_may_be_mixed_in_any_order() -> None:
    first = parse(["chunks=8", "--json", "-m", "--config-dir", "mine", "model=x", "--debug"])
    second = parse(["--debug", "-m", "--config-dir=mine", "--json", "chunks=8", "model=x"])
    assert first.words == second.words == ("chunks=8", "model=x")
    assert first == second and first.multirun and first.config_dir == "mine"
    assert first.json and first.debug and second.json and second.debug


@given(st.permutations(["--json", "--by time", "chunks=8", "-m", "recipe=x", "--config-name mine"]))
def test_no_order_of_words_changes_what_is_meant(order: list[str]) -> None:
    invocation = parse([word for pair in order for word in pair.split()])
    assert sorted(invocation.words) == ["balance=time", "chunks=8", "recipe=x"]
    assert invocation.config_name == "mine" and invocation.json and invocation.multirun


def test_by_is_short_for_the_balance_group() -> None:
    assert parse(["--by", "time"]).words == ("balance=time",)
    assert parse(["--by=time"]).words == ("balance=time",)


def test_info_takes_a_topic_or_none() -> None:
    assert parse(["--info", "defaults", "chunks=2"]).info == "defaults"
    assert parse(["-i", "chunks=2"]).info == parse(["--info"]).info == "all"
    assert parse(["--info", "chunks=2"]).words == ("chunks=2",)
    assert parse(["--info", "--debug"]).debug


def test_an_equals_sign_in_an_override_is_left_alone() -> None:
    assert parse(["model.name=a=b"]).words == ("model.name=a=b",)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("ls", "--dry-run -m --cfg --config-dir --by --watch"),
        ("report", "--dry-run -m --config-dir --by --watch"),
        ("launch-script", "--dry-run -m --watch"),
        ("balance", "--dry-run --watch"),
        ("train", "--watch"),
    ],
)
def test_a_command_takes_only_the_flags_that_it_uses(command: str, flags: str) -> None:
    """`gpipe balance --dry-run` was accepted, and balanced."""
    assert parse(["--json"], command=command).json
    for flag in flags.split():
        with pytest.raises(ConfigError, match=f"unknown flag {flag}; it belongs to gpipe"):
            parse([flag, "x"], command=command)


@pytest.mark.parametrize(
    ("command", "words", "keys"),
    [
        ("report", ["a", "b c"], ["run=['a','b c']"]),
        ("report", ["out=x.html", "run=a", "it's"], ["out=x.html", "run=['a','it\\'s']"]),
        ("report", ["run=[a,b]"], ["run=[a,b]"]),
        ("runs", ["./a=b", "--watch"], ["folder='./a=b'", "watch=true"]),
        ("runs", ["a=b"], ["a=b"]),
        ("cp", ["recipe/a", "b.yaml"], ["source='recipe/a'", "target='b.yaml'"]),
        ("cp", ["recipe/a", "b.yaml", "c"], ["source='recipe/a'", "target='b.yaml'", "c"]),
        ("launch-script", ["slurm", "~model.weights"], ["~model.weights", "kind='slurm'"]),
        ("train", ["slurm"], ["slurm"]),
    ],
)
def test_words_without_a_key_get_that_of_their_place(command: str, words: list[str], keys: list[str]) -> None:
    assert parse(words, command=command).words == tuple(keys)


def test_the_words_after_help_are_searched_for() -> None:
    assert parse(["model=hf", "--help", "learning", "rate"]).search == "learning rate"
    assert parse(["-h", "--json", "lr", "model=hf"]).search == "lr"
    assert parse(["folder", "--help"], command="runs").search == ""
    assert parse(["--help", "watch"], command="runs").search == "watch"
