"""What Hydra and OmegaConf raise about a configuration, as one line with the key, the value and a cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gpipe_cli.config.keys import hint_for_unknown, list_options
from gpipe_cli.config.words import CUSTOM, SCALE_KEY, SMALL
from gpipe_cli.errors import ConfigError, or_list

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
            f"{error.override}: cannot be read; if the value is text, put it in quotes that the shell leaves alone: "
            f"\"{key}='{value}'\""
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
        return (
            f"recipe={option} {SCALE_KEY}={SMALL}: no recipe of that name has that scale, remove it; {small}"
        )
    if not group:
        return (
            f"--config-name {missing}: no such config; it is looked for in the folder given as --config-dir"
        )
    wanted = f"{'recipe' if group == 'recipes' else group}={option}: no such option"
    if group in ("hydra/launcher", "hydra/sweeper"):
        wanted += "; pip install 'gpipe-cli[sweeps]' adds joblib, submitit and Optuna"
    return f"{wanted}; {or_list(option, available)}" if available else wanted


def _describe(error: Exception, command: str) -> str:
    # Hydra 1.4 raises some errors without a text, and their cause has it.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    whole = " ".join(f"{error}".split()) or " ".join(f"{cause}".split())
    in_file = re.match(r"In '(.+?)': (\w+) raised while composing config: (.*)", whole)
    full_key = re.search(r"full_key: (\S+)", whole)
    key = getattr(cause, "full_key", None) or (full_key[1] if full_key else "")
    unknown = re.search(r"Key '(.+?)' (?:is )?not in|Could not override '(.+?)'", f"{cause} {whole}")
    if unknown:
        key = key or next(name for name in unknown.groups() if name)
        place = f" in {in_file[1]}.yaml" if in_file else ""
        return f"unknown key '{key}'{place}; {hint_for_unknown(key, command)}"
    if deleted := re.search(r"Could not delete from config.*'([^']+)'", whole):
        return f"~{deleted[1]}: there is no such key to remove; {hint_for_unknown(deleted[1], command)}"
    line = re.search(r"Error merging override (.+)", str(error))
    reason = _reason(in_file[3] if in_file else _first_line(cause), cause, key)
    return f"{line[1].removeprefix('++') if line else key or 'configuration'}: {reason}"


def _reason(text: str, error: Exception, key: str) -> str:
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
    if "ListConfig indices" in text or "invalid literal for int" in text or "list indices" in text:
        return "is below a list; set the list as a whole, <key>=[...]"
    return f"{text[0].lower()}{text[1:]}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
