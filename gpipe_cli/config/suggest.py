"""What was probably meant: near names for a misspelt key, option, command or flag."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'chunks'?`, or an empty text where nothing is near."""
    candidates = list(known)
    near = get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not near:  # a right name in the wrong place: lr -> optimizer.lr
        near = [name for name in candidates if name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f"did you mean '{near[0]}'?" if near else ""


def or_list(word: str, known: Iterable[str]) -> str:
    """A suggestion where there is one, all the names otherwise."""
    candidates = sorted(known)
    return did_you_mean(word, candidates) or f"one of: {', '.join(candidates)}"
