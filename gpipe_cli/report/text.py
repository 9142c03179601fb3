"""Text from outside made safe to show: no control characters that move a cursor or turn text around."""

from __future__ import annotations

import unicodedata

UNSEEN = ("Cc", "Cf", "Cs", "Co")  # control, format, surrogate, private use


def plain(text: str) -> str:
    """Control and formatting characters removed, white space folded: a name cannot move the cursor."""
    seen = (one for one in text if one.isspace() or unicodedata.category(one) not in UNSEEN)
    return " ".join("".join(seen).split())


def legible(text: str) -> str:
    """Without control and formatting characters, but with its lines and their indentation: for a page."""
    return "".join(one for one in text if one in "\n\t" or unicodedata.category(one) not in UNSEEN)
