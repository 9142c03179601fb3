from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import newcomer


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_new_user_gets_from_installing_to_predictions_by_the_commands_that_gpipe_prints(
    tmp_path: Path,
) -> None:
    newcomer.walk(tmp_path)
