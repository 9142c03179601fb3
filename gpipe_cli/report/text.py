"""Text from outside made safe for a terminal: one line, no control characters."""

from __future__ import annotations

import unicodedata

UNSEEN = ("Cc", "Cf", "Cs", "Co")  # control, format, surrogate, private use


def plain(text: str) -> str:
    """Control and formatting characters removed, white space folded: a name cannot move the cursor."""
    seen = (one for one in text if one.isspace() or unicodedata.category(one) not in UNSEEN)
    return " ".join("".join(seen).split())
