from __future__ import annotations

from typing import Any

import pytest

from gpipe_cli.config.references import check_references
from gpipe_cli.errors import ConfigError


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
