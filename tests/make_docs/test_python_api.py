"""The page of the Python API documents every public name."""

from __future__ import annotations

import importlib
import inspect

import pytest

from make_docs.python_api import MODULES, public_members, public_names, python_page


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_and_member_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    values = {public: getattr(module, public) for public in public_names(module)}
    members = {
        f"{public}.{member}": getattr(cls, member)
        for public, cls in values.items()
        if inspect.isclass(cls)
        for member, _ in public_members(cls)
    }
    assert [public for public, value in {**values, **members}.items() if not inspect.getdoc(value)] == []


def test_signatures_are_as_they_are_written_and_arguments_become_a_list() -> None:
    page = python_page()
    assert "    checkpoint: str | Iterable[str] = 'except_last'," in page
    assert "- `key`: determines all random numbers of the step" in page
    assert "GPipe.named_parameters" not in page  # documented by torch
