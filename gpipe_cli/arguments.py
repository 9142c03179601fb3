"""The words of the command line: flags, sugar and overrides, in any order.

Hydra 1.3 wants its flags before the overrides and knows none of ours; here they are told apart. Nothing is
imported that costs time, so `gpipe --help` and completion stay quick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpipe_cli.config.recipes import to_group
from gpipe_cli.config.suggest import or_list
from gpipe_cli.errors import ConfigError

# Flags of ours: a switch sets the field of Invocation of that name.
SWITCHES = {
    "--help": "help",
    "-h": "help",
    "--json": "json",
    "--dry-run": "dry_run",
    "--debug": "debug",
    "--version": "version",
    "-V": "version",
}
# Flags that Hydra answers. `--experimental-rerun` loads a pickle and is left out.
HYDRA_SWITCHES = ("--multirun", "-m", "--run", "-r", "--resolve", "--hydra-help")
HYDRA_VALUES = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn")
INFO = ("--info", "-i")
INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CFG = ("--cfg", "-c")
CFG_TOPICS = ("job", "hydra", "all")
FLAGS = (*SWITCHES, *HYDRA_SWITCHES, *HYDRA_VALUES, *INFO, "--by")
PLAIN_FLAGS = tuple(
    flag for flag in SWITCHES if flag != "--dry-run"
)  # of a command that has no configuration
MODES = (("--multirun", "-m"), ("--run", "-r"), CFG, INFO, ("--hydra-help",))  # Hydra takes one of them


@dataclass(frozen=True)
class Invocation:
    """One command line, sorted."""

    words: tuple[str, ...] = ()
    """What is no flag: overrides, or the arguments of `ls`."""
    hydra: tuple[str, ...] = ()
    """Flags for Hydra, with their values."""
    help: bool = False
    json: bool = False
    dry_run: bool = False
    debug: bool = False
    version: bool = False

    @property
    def prints_config(self) -> bool:
        """Hydra only shows something and runs no job."""
        return any(flag in self.hydra for flag in (*CFG, *INFO, "--hydra-help"))

    @property
    def multirun(self) -> bool:
        return "--multirun" in self.hydra or "-m" in self.hydra

    def value(self, *flags: str) -> str | None:
        """What follows a flag of Hydra's, under any of its names; the last one given wins."""
        found = [after for flag, after in zip(self.hydra, self.hydra[1:], strict=False) if flag in flags]
        return found[-1] if found else None


def parse(arguments: list[str], known: Sequence[str] = FLAGS) -> Invocation:
    """Sort the words that follow the command, which may have any of the known flags."""
    invocation = _sorted(arguments, known)
    _check(invocation)
    return invocation


def _sorted(arguments: list[str], known: Sequence[str]) -> Invocation:
    words: list[str] = []
    hydra: list[str] = []
    switches: dict[str, bool] = {}
    rest = iter(_split_equals(arguments))
    pending: str | None = None
    while (word := pending if pending is not None else next(rest, None)) is not None:
        pending = None
        if word.startswith("-") and word not in known:
            raise ConfigError(f"unknown flag {word}; {or_list(word, known)}")
        if word in SWITCHES:
            switches[SWITCHES[word]] = True
        elif word in HYDRA_SWITCHES:
            hydra.append(word)
        elif word in HYDRA_VALUES:
            hydra += [word, _value(word, rest)]
        elif word in INFO:
            pending = next(rest, None)
            topic = pending if pending in INFO_TOPICS else None
            pending = None if topic else pending
            hydra += [word, topic or "all"]
        elif word == "--by":
            words.append(f"balance={_value(word, rest)}")
        else:
            words.append(word)
    return Invocation(words=tuple(to_group(words)), hydra=tuple(hydra), **switches)


def _check(invocation: Invocation) -> None:
    """Flags that exclude or need one another: Hydra would fail on them with a traceback, or say nothing."""
    modes = [flag for names in MODES for flag in names if flag in invocation.hydra]
    if len(modes) > 1:
        raise ConfigError(f"{modes[0]} and {modes[1]} exclude each other; give one of them")
    topic = invocation.value(*CFG)
    if topic not in (None, *CFG_TOPICS):
        raise ConfigError(f"--cfg {topic}: {or_list(str(topic), CFG_TOPICS)}")
    for flag in ("--resolve", "--package", "-p"):
        if flag in invocation.hydra and topic is None:
            raise ConfigError(f"{flag} needs --cfg; it says how a configuration is printed")
    if invocation.prints_config and (invocation.json or invocation.dry_run):
        flag = "--json" if invocation.json else "--dry-run"
        raise ConfigError(f"{flag} has no effect with {modes[0]}, which runs nothing; leave it out")


def _split_equals(arguments: list[str]) -> Iterator[str]:
    """`--by=time` is `--by time`; overrides keep their equals sign."""
    for word in arguments:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            yield flag
            yield value
        else:
            yield word


def _value(flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{flag} needs a value")
    return value
