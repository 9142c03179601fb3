"""Values that Hydra's grammar has no characters for, put in the quotes it wants: run_dir=日本, data.path=/mnt/R&D.

Hydra takes few characters outside of quotes: letters and digits of ASCII and some marks. Only the parts of a value that
have others are quoted; lists, mappings, functions, sweeps, references and what is quoted already stay as they are.
"""

from __future__ import annotations

import re

__all__ = ["quoted"]

_PIECE = re.compile(
    r"""
      (?P<quoted> \s* (?: "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' ) \s* (?=[\]}),:]|$) )
    | (?P<mark> [\[\]{}(),] )
    | (?P<plain> (?: \$\{[^}]*\} | \\. | [^\[\]{}(),] )+ )
    """,
    re.VERBOSE,
)
_WITHOUT_QUOTES = re.compile(r"(?:\$\{[^}]*\}|\\.|[\w/\-+.$%*@?|:\\ \t])*", re.ASCII)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
"""What stands for the character itself where there are no quotes, and for both where there are."""


def quoted(word: str) -> str:
    """An override as Hydra can read it; one without a value as it is."""
    key, equals, value = word.partition("=")
    open_marks: list[str] = []
    pieces = []
    for found in _PIECE.finditer(value):
        piece = found[0]
        if found["mark"] is not None:
            if piece in "[{(":
                open_marks.append(piece)
            elif piece in "]})" and open_marks:
                open_marks.pop()
        elif found["plain"] is not None:
            around = open_marks[-1] if open_marks else ""
            # Of a mapping the colon stands between key and value, of a function the equals sign.
            separator = {"{": ":", "(": "="}.get(around, "")
            name, between, rest = piece.partition(separator) if separator else ("", "", piece)
            piece = f"{_plain(name)}{between}{_plain(rest)}"
        pieces.append(piece)
    return f"{key}{equals}{''.join(pieces)}"


def _plain(text: str) -> str:
    inner = text.strip(" \t")
    if _WITHOUT_QUOTES.fullmatch(inner):
        return text
    content = _ESCAPED.sub(r"\1", inner)
    # Inside quotes a backslash is one, unless a quote follows it.
    content = re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + (r"\'" if end[2] else ""), content)
    return text.replace(inner, f"'{content}'")
