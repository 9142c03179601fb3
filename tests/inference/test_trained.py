"""Which processes of a job verify the snapshot that gpipe eval, predict and generate use, and which of them says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpipe_cli.build import components
from gpipe_cli.distributed.world import World
from gpipe_cli.inference import trained
from gpipe_cli.runs.snapshots import manifest
from tests.support.command_line import Gpipe

ALLOW = "allow=[tiny_for_tests]"


def test_ranks_share_the_verification_and_their_launcher_leaves_it_to_them(
    tiny: Gpipe,
    gpipe: Gpipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every rank hashed all files, after its launcher had done so, and both warned of a damaged snapshot."""
    words = ("run_dir=run", "steps=2", "snapshot.every=1", "snapshot.keep=2", "snapshot.monitor=null")
    assert tiny("train", *words).code == 0
    damaged = tmp_path / "run" / "snapshots" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    read: list[Path] = []
    shares: list[tuple[int, int]] = []
    launched: list[Any] = []
    read_verified, verify_part = manifest._read_verified, manifest.verify_part

    def reading(path: Path, *rest: Any, **more: Any) -> Any:
        read.append(path)
        return read_verified(path, *rest, **more)

    def verifying(snapshot: Any, part: int, parts: int) -> None:
        shares.append((part, parts))
        verify_part(snapshot, part, parts)

    monkeypatch.setattr(manifest, "_read_verified", reading)
    monkeypatch.setattr(manifest, "verify_part", verifying)
    monkeypatch.setattr(trained, "run_in_ranks", lambda *given: launched.append(given) or {})

    launcher = gpipe("eval", "run=run", ALLOW, "engine=processes")
    assert launcher.code == 0 and not read and "damaged" not in launcher.err, launcher.err

    settings, job, _ = launched[0]
    for module in (components, trained):
        monkeypatch.setattr(module, "is_rank", lambda: True)
    chosen = trained.snapshot_of(settings, job, World())
    assert chosen is not None and chosen.reason == "last: step 1"
    assert shares == [(0, 1), (0, 1)] and len(read) == len({*read})
    lines = capsys.readouterr().err.splitlines()
    assert ["model.safetensors: damaged: " in line for line in lines] == [True, False]
    assert lines[1] == "last: step 1"
