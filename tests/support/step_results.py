"""Facts of steps and evaluations, as a training loop yields them."""

from __future__ import annotations

from gpipe_cli.training.loop import EvalResult, LossWindow, StepResult


def trained(step: int) -> StepResult:
    return StepResult(
        step=step,
        epoch=0,
        loss=1.0,
        window=LossWindow(1, 1.0, 1.0, 1.0),
        measured=True,
        means={"top1": 0.5, "mean_absolute_error": 1.0},
        lr=0.1,
        samples=4,
        grad_norm=None,
        skipped=False,
        seconds=float(step),
    )


def evaluated(step: int, loss: float = 1.0, **means: float) -> EvalResult:
    return EvalResult(
        step, 0, loss, {"top1": 0.5, "mean_absolute_error": 1.0, **means}, 4, 0.1, 1.0, float(step)
    )
