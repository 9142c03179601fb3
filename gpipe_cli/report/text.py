"""Text from outside made safe for a terminal: one line, no control characters."""

from __future__ import annotations

import unicodedata


def plain(text: str) -> str:
    """Control and formatting characters removed, white space folded: a name cannot move the cursor."""
    folded = " ".join(str(text).split())
    return "".join(one for one in folded if unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Co"))
