from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer import Newcomer, walk


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_newcomer_gets_from_installing_to_exported_weights_by_what_is_printed(tmp_path: Path) -> None:
    walk(Newcomer(tmp_path))
