"""Find and read published dataset files under `data.root`. gpipe downloads nothing and unpickles nothing."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from gpipe_cli.errors import DataError
from gpipe_cli.safe_files import open_regular


def find_file(root: str | Path, folder: str, name: str, cure: str) -> Path:
    """Return the path of the file or of its .gz version; `cure` ends the error message if both are missing."""
    path = Path(root) / folder / name
    for candidate in (path, path.with_name(name + ".gz")):
        if os.path.exists(candidate):  # noqa: PTH110 - unlike Path.exists, False without permission
            return candidate
    raise DataError(f"data.root={root}: {path} is missing; {cure}")


def read_bytes(path: Path, limit: int) -> bytearray:
    """Read at most `limit` bytes, so that a small compressed file cannot fill the memory."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return bytearray((gzip.open(file) if path.suffix == ".gz" else file).read(limit))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or unreadable ({error})") from error
