from __future__ import annotations

import errno

import pytest

from gpipe_cli.errors import ConfigError, GpipeError, NumericError, RunError, StepTimeout, Stopped
from gpipe_cli.report.failure import describe, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GpipeError("x"), 1),
        (ConfigError("x"), 2),
        (RunError("x"), 4),
        (NumericError("x"), 5),
        (StepTimeout("x"), 7),
        (Stopped("x"), 75),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("x"), 1),
        (OSError(errno.ENOSPC, "x"), 6),
        (PermissionError(errno.EACCES, "x"), 6),
        (FileNotFoundError(errno.ENOENT, "x"), 1),
        (SystemExit(0), 1),
        (SystemExit(3), 1),
        (GeneratorExit(), 1),
    ],
)
def test_every_error_has_its_exit_code_and_a_layers_exit_is_no_success(
    error: BaseException, code: int
) -> None:
    assert exit_code(error) == code


def test_an_error_of_ours_needs_no_type_and_any_other_does() -> None:
    assert describe(ConfigError("chunks=0: must be at least 1")) == "chunks=0: must be at least 1"
    assert describe(ValueError("no\nway")) == "ValueError: no way"
    assert describe(KeyError("lr")) == "KeyError: 'lr'"
    assert describe(RuntimeError()) == "RuntimeError"


def test_notes_say_where_it_happened() -> None:
    error = ZeroDivisionError("division by zero")
    error.add_note("in partition 1,\nlayer '\x1b2'")
    assert describe(error) == "ZeroDivisionError: division by zero (in partition 1, layer '2')"
