"""What Hydra and OmegaConf raise about a configuration, as one line with the key, the value and a cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gpipe_cli.config.hydra_loader import CUSTOM
from gpipe_cli.config.options import known_keys, list_options
from gpipe_cli.config.overrides import SCALE_KEY, SMALL
from gpipe_cli.config.schema import GROUPS
from gpipe_cli.errors import ConfigError, did_you_mean, or_list

UNPREPARED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What both raise where they did not expect a value."""
TYPE_NAMES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}


@contextmanager
def config_errors(command: str) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise about a configuration into a ConfigError of one line."""
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_missing_option(error)) from error
    except OverrideParseException as error:
        key, _, value = str(error.override).partition("=")
        raise ConfigError(
            f"{error.override}: cannot be read ({_first_line(error)}); if the value is text, put it in quotes that the "
            f"shell leaves alone: \"{key}='{value}'\""
        ) from error
    except (HydraException, OmegaConfBaseException, *UNPREPARED) as error:
        raise ConfigError(_describe(error, command)) from error
    except RecursionError as error:
        raise ConfigError("configuration: references are nested too deeply, or contain themselves") from error


def _missing_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    available = [name for name in (error.options or []) if name != CUSTOM]
    if group == f"recipes/{SMALL}":
        small = or_list(option, [option.name for option in list_options(group)])
        return f"recipe={option} {SCALE_KEY}={SMALL}: no recipe of that name has that scale, leave it out; {small}"
    label = "recipe" if group == "recipes" else group
    wanted = f"{label}={option}: no such option" if group else _no_primary(missing)
    return f"{wanted}; {or_list(option, available)}" if available else wanted


def _no_primary(name: str) -> str:
    return f"--config-name {name}: no such config; it is looked for in the folder given as --config-dir"


def _describe(error: Exception, command: str) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    whole = " ".join(str(error).split())
    key = getattr(cause, "full_key", None) or ""
    unknown = re.search(r"Key '(.+?)' (?:is )?not in|Could not override '(.+?)'", f"{cause} {whole}")
    if unknown:
        key = key or next(name for name in unknown.groups() if name)
        place = re.match(r"In '(.+?)':", whole)
        hint = (
            _other_owners(key)
            or did_you_mean(key, known_keys(command))
            or f"see `gpipe {command} --help` for every key"
        )
        return f"unknown key '{key}'{f' in {place[1]}.yaml' if place else ''}; {hint}"
    line = re.search(r"Error merging override (.+)", str(error))
    return f"{line[1] if line else key or 'configuration'}: {_reason(cause, key)}"


def _reason(error: Exception, key: str) -> str:
    text = _first_line(error)
    if wrong := re.search(r"could not be converted to (\w+)", text):
        return f"expected {TYPE_NAMES.get(wrong[1], wrong[1])}"
    if "is not a valid bool" in text:
        return f"expected {TYPE_NAMES['Boolean']}"
    if isinstance(error, MissingMandatoryValue):
        return "must be given"
    if "is not Optional" in text:
        return "must not be null"
    if "is not a ListConfig" in text or "with ListConfig" in text:
        return "expected a list in brackets"
    if "is not a subclass of" in text:
        return f"holds several keys; set one of them, {key}.<key>=..."
    return f"{text[0].lower()}{text[1:]}"


def _other_owners(key: str) -> str:
    """Which options of the group have a key that the chosen option does not have."""
    group, _, name = key.partition(".")
    owners = [
        option.name
        for option in (list_options(group) if group in GROUPS else ())
        if any(f"{own}.".startswith(f"{name}.") for own in option.keys)
    ]
    return f"it belongs to {group}={'|'.join(owners)}" if owners else ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
