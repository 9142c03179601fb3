"""The page docs/reference/python.md: every public name of the Python API, from its signature and docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final

from torch import nn

from make_docs.reference import GENERATED

MODULES = (
    "gpipe_cli",
    "gpipe_cli.sequential",
    "gpipe_cli.balance",
    "gpipe_cli.skip",
    "gpipe_cli.offload",
    "gpipe_cli.distributed",
)
INTRODUCTION = """# Python API

What `import gpipe_cli` offers to your own code: the pipeline without the command line. The page is made from the
docstrings, which `help(...)` shows as well. Names that are not listed here may change in any version."""

MAX_WIDTH = 97
ARGUMENT = re.compile(r"^(\w+): ", re.MULTILINE)
"""How a docstring begins the explanation of an argument."""


def python_page() -> str:
    parts = [GENERATED, INTRODUCTION]
    for name in MODULES:
        parts += _module(importlib.import_module(name))
    return "\n\n".join(parts) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """The names that the module offers, without its version."""
    return [name for name in module.__all__ if not name.startswith("__")]


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of ours, also inherited ones; torch documents those of `nn.Module`."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("gpipe_cli.")]
    names = dict.fromkeys(name for base in reversed(own) for name in vars(base))
    for name in names:
        member = inspect.getattr_static(cls, name)
        is_ours = not name.startswith("_") and not hasattr(nn.Module, name)
        if is_ours and (isinstance(member, property) or inspect.isfunction(member)):
            yield name, member


def _module(module: ModuleType) -> Iterator[str]:
    yield f"## `{module.__name__}`"
    yield _text(module)
    for name in public_names(module):
        value = getattr(module, name)
        yield f"### `{name}`"
        yield from _class(name, value) if inspect.isclass(value) else _function(name, value)


def _class(name: str, cls: type) -> Iterator[str]:
    yield _code(_signature(f"class {name}", cls))
    constructor = vars(cls).get("__init__")
    # Its own docstring: `inspect` would take that of nn.Module or object if there is none.
    described = constructor is not None and constructor.__doc__ is not None
    yield from filter(None, [_text(cls), _text(constructor) if described else ""])
    for member_name, member in public_members(cls):
        if isinstance(member, property):
            yield f"**`{name}.{member_name}`**: {_text(member)}"
        else:
            yield from _function(f"{name}.{member_name}", getattr(cls, member_name))


def _function(name: str, function: Any) -> Iterator[str]:
    yield _code(_signature(name, function))
    if text := _text(function):
        yield text


@final
@dataclass(frozen=True)
class _Annotation:
    """An annotation as it is written; `inspect` would quote it, because our modules do not evaluate annotations."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _signature(name: str, value: Any) -> str:
    """In one line, or with each parameter in a line of its own if that is too long."""
    signature = inspect.signature(value)

    def written(annotation: Any) -> Any:
        annotation = getattr(annotation, "__forward_arg__", annotation)
        return _Annotation(annotation) if isinstance(annotation, str) else annotation

    parameters = [
        parameter.replace(annotation=written(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    returns = signature.empty if inspect.isclass(value) else written(signature.return_annotation)
    text = str(signature.replace(parameters=parameters, return_annotation=returns))
    if len(name) + len(text) <= MAX_WIDTH:
        return f"{name}{text}"
    *_, end = text.rpartition(")")
    lines: list[str] = []
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only and (before is None or before.kind not in (parameter.kind, parameter.VAR_POSITIONAL)):
            lines.append("    *,")
        lines.append(f"    {parameter},")
    return "\n".join([f"{name}(", *lines, f"){end}"])


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _text(value: Any) -> str:
    """The docstring in Markdown: indented examples are code already, and explained arguments become a list."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):  # made by @dataclass
        return ""
    return text if inspect.ismodule(value) else ARGUMENT.sub(r"- `\1`: ", text)
