"""The files of a base model: a snapshot refers to them, by size and digest, instead of holding frozen parameters.

A run and the commands that read its snapshots name the directory of these files (`model.path`). Wherever it is, its
files must be those that the run was trained with.
"""

from __future__ import annotations

import hashlib
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import RunError
from gpipe_cli.training.snapshot.durable import FileDigest


@final
@dataclass(frozen=True)
class BaseFiles:
    directory: str
    """As the run's configuration names it."""
    files: Mapping[str, FileDigest]
    """By their names in the directory."""

    def to_json(self) -> dict[str, Any]:
        files = {name: asdict(digest) for name, digest in sorted(self.files.items())}
        return {"directory": self.directory, "files": files}

    @staticmethod
    def from_json(content: Any) -> BaseFiles:
        """Raise ValueError unless it has the form that `to_json` gives."""
        match content:
            case {"directory": str(directory), "files": dict(files)} if files:
                return BaseFiles(directory, {name: _digest(name, entry) for name, entry in files.items()})
        raise ValueError(f"{reprlib.repr(content)} does not describe the files of a base model")

    def check(self, directory: Path, *, contents: bool = True) -> None:
        """Raise RunError unless the directory has these files.

        contents: compare digests, which reads the files; otherwise only sizes.
        """
        for name, expected in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                same = size == expected.size and (not contents or _sha256(path) == expected.sha256)
            except OSError as error:
                raise RunError(
                    f"needs the base model it was trained on, but {path} cannot be read ({error.strerror}); "
                    "give model.path=<directory> if the base model has moved"
                ) from error
            if not same:
                reason = (
                    "content" if size == expected.size else f"{size:,} instead of {expected.size:,} bytes"
                )
                raise RunError(
                    f"was trained on another base model: {path} has changed ({reason}); "
                    "give model.path=<directory> with the files that the run began with"
                )


def digest_files(directory: Path, names: Iterable[str]) -> BaseFiles:
    """Read the files once. Raises RunError if one cannot be read."""
    digests = {}
    for name in sorted(names):
        path = directory / name
        try:
            digests[name] = FileDigest(path.stat().st_size, _sha256(path))
        except OSError as error:
            raise RunError(f"{path}: a file of the base model cannot be read: {error.strerror}") from error
    return BaseFiles(str(directory), digests)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(name: str, entry: Any) -> FileDigest:
    match entry:
        case {"size": int(size), "sha256": str(digest)} if name and os.sep not in name and name != os.pardir:
            return FileDigest(size, digest)
    raise ValueError(f"{reprlib.repr(name)}: {reprlib.repr(entry)} does not describe a file of a base model")
