"""The rows of `gpipe check` on a report page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from gpipe_cli.report.page.html import Html, join, table, tag
from gpipe_cli.report.page.run_files import as_rows, as_text

VERDICTS = ("ok", "note", "problem", "skipped")
MAX_ROWS = 1000


@final
@dataclass(frozen=True)
class CheckRow:
    name: str
    verdict: str
    """Empty if the file has none that gpipe knows."""
    result: str
    to_do: str


def read_check_rows(check: Mapping[str, Any]) -> tuple[CheckRow, ...]:
    """The rows of a check.json; empty if there is none."""
    return tuple(
        CheckRow(
            as_text(row.get("name")),
            verdict if (verdict := as_text(row.get("verdict"))) in VERDICTS else "",
            as_text(row.get("result")),
            as_text(row.get("to_do")),
        )
        for row in as_rows(check.get("rows"))[:MAX_ROWS]
    )


def verdict_counts(rows: Sequence[CheckRow]) -> dict[str, int]:
    """How many rows have each verdict, for the verdicts that occur."""
    counted = Counter(row.verdict for row in rows)
    return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}


def check_table(rows: Sequence[CheckRow]) -> Html:
    return table("checks", ("verdict", "check", "result"), (_cells(row) for row in rows))


def _cells(row: CheckRow) -> tuple[Html, str, Html]:
    to_do = tag("p", {"class": "to-do"}, row.to_do) if row.to_do else None
    verdict = tag("span", {"class": f"verdict {row.verdict}".rstrip()}, row.verdict or "-")
    return verdict, row.name, join([row.result, to_do])
