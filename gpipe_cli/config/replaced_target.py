"""What a `_target_` on the command line keeps of the option that it replaces: `optimizer._target_=torch.optim.Adam`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpipe_cli.config.options import list_options
from gpipe_cli.config.overrides import sets_key

KEPT_KEYS = {"optimizer": ("lr",)}
"""Keys that a component has whatever its `_target_`. The others may mean something else to another one, as
weight_decay does to Adam, so they are left out."""


def notes_on_replaced(
    tree: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]
) -> Iterator[str]:
    """A line for each replaced option of which something is kept though nobody gave it: that, and what is left out.

    choices: the option of each group before it was replaced.
    """
    for group, kept in KEPT_KEYS.items():
        node, choice = tree.get(group) or {}, choices.get(group)
        for option in list_options(group):
            if option.name != choice or option.target == node.get("_target_"):
                continue
            others = [key for key in option.keys if not sets_key(overrides, f"{group}.{key}")]
            values = ", ".join(f"{key}={node.get(key)}" for key in others if key in kept)
            left_out = ", ".join(key for key in others if key not in kept)
            if values and sets_key(overrides, f"{group}._target_"):
                yield (
                    f"{group}._target_={node.get('_target_')}: keeps {values} of {group}={choice} and leaves out "
                    f"its {left_out}; give those that you want"
                )
