from __future__ import annotations

import sys

import pytest

from benchmarks.published_gpt import STAGES, Errors, error, left_out, read_rows


def test_the_published_iterations_of_gpt_on_a100s_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_rows()
    errors = Errors.of(error(row) for row in rows)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(rows)} published iterations on A100s: {errors}\n")
    assert len(rows) == 350
    assert errors.mean <= 0.08 and errors.nine_of_ten <= 0.16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "nine_of_ten"),
    [
        ("size", 0.16),
        pytest.param(
            "hidden", 0.16, marks=pytest.mark.xfail(strict=True, reason="16.8 %: the target is missed")
        ),
    ],
)
def test_a_fit_predicts_models_that_it_has_not_seen(
    part: str, nine_of_ten: float, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = left_out(read_rows(), lambda row: getattr(row, part))
    errors = Errors.of(error for _, _, errors in parts for error in errors)
    with capsys.disabled():
        sys.stdout.write(f"\nfitted without one {part}, judged by it: {errors}\n")
    assert errors.mean <= 0.08 and errors.nine_of_ten <= nine_of_ten


@pytest.mark.slow
def test_measured_partitions_of_wider_models_are_predicted() -> None:
    for stage in STAGES:
        assert stage.estimate() == pytest.approx(stage.measured_ms, rel=0.2), stage.model
