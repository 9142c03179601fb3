"""How many classes a model may tell apart."""

from __future__ import annotations

from gpipe_cli.values import check_whole_number


def check_num_classes(num_classes: int) -> None:
    check_whole_number("model.num_classes", num_classes, least=1)
