"""manifest.json: what belongs to a snapshot, and how to tell that nothing of it has changed.

It lists each file with size and sha256, carries the record of where training stood, and a digest of itself.
It is written last, so a directory without one is no snapshot. The bytes must be exactly those that this file
would write: no change goes unnoticed, not even one that means the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.training.snapshot.durable import FileFacts

MANIFEST = "manifest.json"
FORMAT = 1
LARGEST = 64 * 2**20
MODEL, OPTIMIZER, BUFFERS = "model.safetensors", "optimizer.safetensors", "buffers.safetensors"
FILES = (MODEL, OPTIMIZER, BUFFERS)
"""The names a manifest may list: a hostile one must not lead anywhere else."""


@final
@dataclass(frozen=True)
class Manifest:
    files: Mapping[str, FileFacts]
    record: Mapping[str, Any]
    """Where training stood; `record` knows what it means."""


def encode(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "files": {name: asdict(facts) for name, facts in sorted(manifest.files.items())},
        "record": dict(manifest.record),
    }
    return _text({**body, "digest": _digest(body)})


def decode(raw: bytes, path: Path) -> Manifest:
    """The manifest in these bytes; RunError where they are not the ones that were written."""
    try:
        content = parse_json(raw)
    except ValueError as error:
        raise RunError(f"{path}: damaged: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path}: damaged: holds no manifest")
    digest = content.pop("digest", None)
    if content.get("format") != FORMAT:
        raise RunError(
            f"{path}: has the format {reprlib.repr(content.get('format'))}, this gpipe reads {FORMAT}; "
            "use the gpipe that wrote it, or it is damaged"
        )
    if digest != _digest(content) or raw != _text({**content, "digest": digest}):
        raise RunError(f"{path}: damaged: its digest does not fit its content")
    files = _files(content.get("files"), path)
    if MODEL not in files:
        raise RunError(f"{path}: damaged: lists no {MODEL}")
    return Manifest(files, _mapping(content.get("record"), path))


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        raw = read_regular(path, LARGEST, base=directory)
    except FileNotFoundError as error:
        raise RunError(f"{directory}: is no snapshot, or an incomplete one: it has no {MANIFEST}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    return decode(raw, path)


def _text(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=1, ensure_ascii=False)}\n".encode("utf-8", "surrogatepass")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(body)).hexdigest()


def _files(content: Any, path: Path) -> dict[str, FileFacts]:
    return {name: _facts(name, entry, path) for name, entry in _mapping(content, path).items()}


def _facts(name: str, entry: Any, path: Path) -> FileFacts:
    match entry:
        case {"size": int(size), "sha256": str(digest)} if size >= 0 and re.fullmatch("[0-9a-f]{64}", digest):
            if name in FILES:
                return FileFacts(size, digest)
    raise RunError(
        f"{path}: damaged: no file of a snapshot is described by {reprlib.repr(name)}: {reprlib.repr(entry)}"
    )


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise RunError(f"{path}: damaged: a part of it is missing")
    return content
