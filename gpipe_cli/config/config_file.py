"""gpipe <command> config=FILE: a whole run as one file of keys, or the config.yaml of an earlier run.

Keys of the command line override those of the file. Relative paths in the file mean what they mean on the command
line: they start in the current folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from gpipe_cli.config.compose import Request
from gpipe_cli.config.file_words import ConfigFile, file_words
from gpipe_cli.config.overrides import override_group, override_key, quote_override, recipe_to_group
from gpipe_cli.config.saved_config import is_saved, reduce_saved
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.config.yaml_files import load_mapping
from gpipe_cli.errors import ConfigError, did_you_mean

WORD = "config="


@contextmanager
def read_request(
    command: str, words: Sequence[str], config_name: str | None, config_dir: str | None
) -> Iterator[tuple[Request, tuple[str, ...]]]:
    """What the words of a command line ask for, with the keys of the file they name, and notes about that file.

    Inside, an error about a key of the file begins with the file's name.
    """
    file, own = split_config_file(command, words)
    with file.named_in_errors() if file else nullcontext():
        overrides = recipe_to_group([*(file.words if file else ()), *map(quote_override, own)])
        request = Request(command, tuple(overrides), config_name, config_dir)
        yield request, file.notes if file else ()


def split_config_file(command: str, words: Sequence[str]) -> tuple[ConfigFile | None, list[str]]:
    """The file that the words of a command line name, if any, and the other words."""
    names = [word.removeprefix(WORD) for word in words if word.startswith(WORD)]
    others = [word for word in words if not word.startswith(WORD)]
    if len(names) > 1:
        raise ConfigError(f"config: given {len(names)} times ({', '.join(names)}); give one file")
    return (_read(names[0], command, others) if names else None), others


def _read(name: str, command: str, others: Sequence[str]) -> ConfigFile:
    plain, notes = load_mapping(_existing(name)), []
    if is_saved(plain):
        plain, left_out = reduce_saved(plain, command)
        if left_out:
            notes.append(f"{name}: gpipe {command} leaves out what it does not use: {', '.join(left_out)}")
    try:
        words = file_words(plain, command)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    for group in GROUPS:
        option = _option_given(group, others)
        keys = [override_key(word) for word in words if override_key(word).startswith(f"{group}.")]
        if option is not None and keys:
            notes.append(f"{name}: {option} replaces its keys {', '.join(keys)}")
    return ConfigFile(name, tuple(word for word in words if not _is_replaced(word, others)), tuple(notes))


def _existing(name: str) -> Path:
    path = Path(name)
    if not name or "\0" in name:
        raise ConfigError("config: give config=<file>")
    if path.is_dir():
        saved = path / "config.yaml"
        cure = f"give config={saved}" if saved.is_file() else "give a file in it"
        raise ConfigError(f"config={name}: is a directory; {cure}")
    if not path.exists():
        siblings = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        suggestion = did_you_mean(path.name, sorted(siblings))
        raise ConfigError(f"config={name}: no such file{f'; {suggestion}' if suggestion else ''}")
    return path


def _is_replaced(word: str, others: Sequence[str]) -> bool:
    """Whether the command line sets the key itself, a key above it, or the option of its group."""
    key, group = override_key(word), override_group(word)
    given = {override_key(other) for other in others}
    return bool(
        any(f"{key}.".startswith(f"{other}.") for other in given)
        or (key == "steps" and "epochs" in given)  # the file's steps would override them
        or (group in GROUPS and _option_given(group, others))
    )


def _option_given(group: str, others: Sequence[str]) -> str | None:
    return next((word for word in others if override_key(word) in (group, f"{group}._target_")), None)
