"""Suggestions for a misspelt key, option, command or flag."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'chunks'?`, or an empty string if no name is close."""
    candidates = list(known)
    matches = get_close_matches(word, candidates, n=1, cutoff=0.6)
    if not matches:  # the right name in the wrong place: lr -> optimizer.lr
        matches = [name for name in candidates if name.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    return f"did you mean '{matches[0]}'?" if matches else ""


def or_list(word: str, known: Iterable[str]) -> str:
    """A suggestion if a name is close, otherwise all names."""
    candidates = sorted(known)
    return did_you_mean(word, candidates) or f"choose one of: {', '.join(candidates)}"
