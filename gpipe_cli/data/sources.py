"""Published files under `data.root`: where they must lie, and that they are whole.

Nothing is downloaded and nothing is unpickled. The file knows nothing of what the bytes mean.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from gpipe_cli.errors import DataError
from gpipe_cli.safe_files import open_regular


def find_file(root: str | Path, folder: str, name: str, cure: str) -> Path:
    """The file, or the same compressed; `cure` tells what to put there if neither is."""
    path = Path(root) / folder / name
    for candidate in (path, path.with_name(name + ".gz")):
        if os.path.exists(candidate):  # noqa: PTH110 - unlike a Path it says no where it may not look
            return candidate
    raise DataError(f"data.root={root}: {path} is missing; {cure}")


def read_bytes(path: Path, most: int) -> bytearray:
    """At most `most` bytes, so that a small compressed file cannot fill the memory."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return bytearray((gzip.open(file) if path.suffix == ".gz" else file).read(most))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or not readable ({error})") from error
