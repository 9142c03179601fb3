from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.page.charts import Scale, metric_charts
from gpipe_cli.report.page.run_record import CurvePoint, MetricCurve, RunRecord

numbers = st.floats(-1e100, 1e100)


@given(st.lists(numbers, min_size=1), st.sampled_from([0.0, 0.06]))
def test_every_value_has_a_position_and_ticks_lie_on_the_axis(values: list[float], margin: float) -> None:
    scale = Scale.over(values, margin=margin)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in values)
    ticks = scale.ticks()
    assert ticks == sorted(ticks) and 1 <= len(ticks) <= 12
    assert all(-1e-6 <= scale.share(tick) <= 1 + 1e-6 for tick in ticks)


def test_ticks_are_round_numbers() -> None:
    assert Scale(0, 1).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Scale(0, 2437.5).ticks() == [0, 500, 1000, 1500, 2000]


@pytest.mark.parametrize(("metric", "beyond"), [("top1", False), ("loss", True)])
def test_no_axis_of_percentages_goes_beyond_100(metric: str, beyond: bool) -> None:
    """All samples right, from the first evaluation on: one value, whose axis went to 140 %."""
    curve = MetricCurve(
        metric, "eval", tuple(CurvePoint(step, step, 1.0, 1.0, 1.0) for step in (1, 2)), (1, 1.0)
    )
    (chart,) = metric_charts(RunRecord(Path(), curves=(curve,)))
    assert ("1.4" in chart or "140 %" in chart) == beyond
    assert ("100 %" in chart) != beyond
